"""What torch and Triton do not promise to keep: one file a subject, patches apart.

Code elsewhere in the package uses public interfaces only, so that a new release can break this
room and no other.
"""
