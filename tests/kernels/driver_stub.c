/* In place of libcuda, on a machine without a GPU: keeps what kernels are launched with. */

#include <string.h>

#include "cuda.h"

#define MOST_LAUNCHES 8
#define MOST_PARAMETERS 64
#define MOST_MAPS 256
/* A tensor map of ours begins with this and its number. */
#define OF_MAP 0xdeca000000000000ull

struct launch {
  char kernel[64];
  unsigned programs, threads, attributes, first_attribute;
  unsigned long long stream, parameters[MOST_PARAMETERS];
};

struct launch launches[MOST_LAUNCHES];
int launched;

/* What a tensor map was made of; of rows and columns, columns come first. */
struct map {
  unsigned long long address, sizes[2], stride, box[2], type, swizzle;
} maps[MOST_MAPS];
int made;

/* How many parameters each launch is going to have; the driver knows it from the kernel. */
int expected[MOST_LAUNCHES];

static CUresult done(void) { return CUDA_SUCCESS; }

CUresult cuInit(unsigned flags) { return done(); }
CUresult cuDriverGetVersion(int *version) { return *version = 13000, done(); }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal, done(); }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return done(); }
CUresult cuCtxSetCurrent(CUcontext context) { return done(); }
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)1, done(); }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, done(); }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return done(); }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, done(); }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { return done(); }
CUresult cuModuleUnload(CUmodule module) { return done(); }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return done(); }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return done();
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  return *text = "an error", done();
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
    *value = 9;
    break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
    *value = 0;
    break;
  default: /* of shared memory, as much as there is; of all else enough */
    *value = 227 << 10;
  }
  return done();
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return done();
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  return *(CUdeviceptr *)value = pointer, done();
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  return *function = (CUfunction)strdup(name), done();
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *sizes,
                                const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  struct map of = {(unsigned long long)address, {sizes[0], sizes[1]}, strides[0],
                   {box[0], box[1]},            type,                 swizzle};
  unsigned long long number = OF_MAP + made % MOST_MAPS;
  maps[made++ % MOST_MAPS] = of;
  memcpy(map, &number, sizeof number);
  return done();
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters,
                          void **extra) {
  struct launch *launch = &launches[launched];
  strncpy(launch->kernel, (const char *)function, sizeof launch->kernel - 1);
  launch->programs = config->gridDimX * config->gridDimY * config->gridDimZ;
  launch->threads = config->blockDimX;
  launch->attributes = config->numAttrs;
  launch->first_attribute = config->numAttrs ? config->attrs[0].id : 0;
  launch->stream = (unsigned long long)config->hStream;
  for (int i = 0; i < expected[launched]; i++)
    memcpy(&launch->parameters[i], parameters[i], sizeof launch->parameters[i]);
  launched++;
  return done();
}
