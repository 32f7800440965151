"""What a pass of Inductor's is, torch 2.11 to 2.14. Importing it takes Inductor's configuration."""

from __future__ import annotations

from torch._inductor.custom_graph_pass import CustomGraphPass

__all__ = ["CustomGraphPass"]
