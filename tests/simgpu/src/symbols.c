// SPDX-License-Identifier: BSD-3-Clause
// Functions by name and version, and the words for error codes.
#include <stdbool.h>
#include <string.h>

#include "driver.h"

enum {
    SYMBOL_FOUND = 0,
    SYMBOL_NOT_FOUND = 1,
    SYMBOL_VERSION_NOT_SUFFICIENT = 2,
};

#define FUNCTIONS(X)                                                  \
    X(cuInit, cuInit, 2000)                                           \
    X(cuDriverGetVersion, cuDriverGetVersion, 2020)                   \
    X(cuDeviceGet, cuDeviceGet, 2000)                                 \
    X(cuDeviceGetCount, cuDeviceGetCount, 2000)                       \
    X(cuDeviceGetName, cuDeviceGetName, 2000)                         \
    X(cuDeviceGetUuid, cuDeviceGetUuid, 9020)                         \
    X(cuDeviceGetUuid, cuDeviceGetUuid_v2, 11040)                     \
    X(cuDeviceTotalMem, cuDeviceTotalMem_v2, 3020)                    \
    X(cuDeviceGetAttribute, cuDeviceGetAttribute, 2000)               \
    X(cuDeviceGetPCIBusId, cuDeviceGetPCIBusId, 4010)                 \
    X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000)       \
    X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, 11000) \
    X(cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState, 7000)   \
    X(cuCtxCreate, cuCtxCreate_v2, 3020)                              \
    X(cuCtxCreate, cuCtxCreate_v4, 12050)                             \
    X(cuCtxDestroy, cuCtxDestroy_v2, 4000)                            \
    X(cuCtxSetCurrent, cuCtxSetCurrent, 4000)                         \
    X(cuCtxGetCurrent, cuCtxGetCurrent, 4000)                         \
    X(cuCtxPushCurrent, cuCtxPushCurrent_v2, 4000)                    \
    X(cuCtxPopCurrent, cuCtxPopCurrent_v2, 4000)                      \
    X(cuCtxGetDevice, cuCtxGetDevice, 2000)                           \
    X(cuCtxSynchronize, cuCtxSynchronize, 2000)                       \
    X(cuStreamCreate, cuStreamCreate, 2000)                           \
    X(cuStreamDestroy, cuStreamDestroy_v2, 4000)                      \
    X(cuStreamSynchronize, cuStreamSynchronize, 2000)                 \
    X(cuStreamQuery, cuStreamQuery, 2000)                             \
    X(cuStreamGetCtx, cuStreamGetCtx, 9020)                           \
    X(cuEventCreate, cuEventCreate, 2000)                             \
    X(cuEventDestroy, cuEventDestroy_v2, 4000)                        \
    X(cuEventRecord, cuEventRecord, 2000)                             \
    X(cuEventQuery, cuEventQuery, 2000)                               \
    X(cuEventSynchronize, cuEventSynchronize, 2000)                   \
    X(cuEventElapsedTime, cuEventElapsedTime, 2000)                   \
    X(cuMemAlloc, cuMemAlloc_v2, 3020)                                \
    X(cuMemFree, cuMemFree_v2, 3020)                                  \
    X(cuMemGetInfo, cuMemGetInfo_v2, 3020)                            \
    X(cuMemGetAddressRange, cuMemGetAddressRange_v2, 3020)            \
    X(cuMemcpyHtoD, cuMemcpyHtoD_v2, 3020)                            \
    X(cuMemcpyDtoH, cuMemcpyDtoH_v2, 3020)                            \
    X(cuMemcpyDtoD, cuMemcpyDtoD_v2, 3020)                            \
    X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, 3020)                  \
    X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, 3020)                  \
    X(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, 3020)                  \
    X(cuMemsetD8, cuMemsetD8_v2, 3020)                                \
    X(cuMemsetD32, cuMemsetD32_v2, 3020)                              \
    X(cuMemHostAlloc, cuMemHostAlloc, 2020)                           \
    X(cuMemAllocHost, cuMemAllocHost_v2, 3020)                        \
    X(cuMemFreeHost, cuMemFreeHost, 2000)                             \
    X(cuMemHostRegister, cuMemHostRegister_v2, 6050)                  \
    X(cuMemAllocManaged, cuMemAllocManaged, 6000)                     \
    X(cuIpcGetMemHandle, cuIpcGetMemHandle, 4010)                     \
    X(cuModuleLoadData, cuModuleLoadData, 2000)                       \
    X(cuModuleUnload, cuModuleUnload, 2000)                           \
    X(cuModuleGetFunction, cuModuleGetFunction, 2000)                 \
    X(cuLaunchKernel, cuLaunchKernel, 4000)                           \
    X(cuGetErrorString, cuGetErrorString, 6000)                       \
    X(cuGetErrorName, cuGetErrorName, 6000)                           \
    X(cuGetProcAddress, cuGetProcAddress, 11030)                      \
    X(cuGetProcAddress, cuGetProcAddress_v2, 12000)                   \
    X(cuCheckpointProcessGetState, cuCheckpointProcessGetState, 12080)                     \
    X(cuCheckpointProcessGetRestoreThreadId, cuCheckpointProcessGetRestoreThreadId, 12080) \
    X(cuCheckpointProcessLock, cuCheckpointProcessLock, 12080)                             \
    X(cuCheckpointProcessCheckpoint, cuCheckpointProcessCheckpoint, 12080)                 \
    X(cuCheckpointProcessRestore, cuCheckpointProcessRestore, 12080)                       \
    X(cuCheckpointProcessUnlock, cuCheckpointProcessUnlock, 12080)                         \
    X(cuCheckpointOperationComplete, cuCheckpointOperationComplete, 13040)

// Only their addresses are needed here, and each has a type of its own.
#define DECLARE(base, symbol, since) void symbol##_(void) __asm__(#symbol);
FUNCTIONS(DECLARE)

#define ENTRY(base, symbol, since) {#base, since, symbol##_},
static const struct symbol symbols[] = {FUNCTIONS(ENTRY)};

API CUresult cuDriverGetVersion(int *version);
API CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                                 int *status);
API CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags);
API CUresult cuGetErrorName(CUresult error, const char **text);
API CUresult cuGetErrorString(CUresult error, const char **text);

API CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                                 int *status)
{
    if (!name || !function || flags > 2)
        return CUDA_ERROR_INVALID_VALUE;
    int driver_version = 0;
    cuDriverGetVersion(&driver_version);
    int best = 0, found = SYMBOL_NOT_FOUND;
    *function = NULL;
    for (size_t i = 0; i < sizeof(symbols) / sizeof(*symbols); i++) {
        const struct symbol *one = &symbols[i];
        if (strcmp(one->name, name) != 0 || one->since > driver_version)
            continue;
        if (one->since > version) {
            if (found == SYMBOL_NOT_FOUND)
                found = SYMBOL_VERSION_NOT_SUFFICIENT;
        } else if (one->since > best) {
            best = one->since;
            memcpy(function, &one->function, sizeof(one->function));
            found = SYMBOL_FOUND;
        }
    }
    if (status)
        *status = found;
    return found == SYMBOL_FOUND ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

API CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE",
     "CUDA-capable device(s) is/are busy or unavailable"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM",
     "OS call failed or operation not supported on this OS"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE",
     "the operation cannot be performed in the present state"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE",
     "cannot set while device is active in this process"},
    {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
     "system has unsupported display driver / cuda driver combination"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static CUresult find_error(CUresult error, const char **text, bool name)
{
    if (!text)
        return CUDA_ERROR_INVALID_VALUE;
    *text = NULL;
    for (size_t i = 0; i < sizeof(errors) / sizeof(*errors); i++)
        if (errors[i].code == error)
            *text = name ? errors[i].name : errors[i].text;
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorName(CUresult error, const char **text)
{
    return find_error(error, text, true);
}

API CUresult cuGetErrorString(CUresult error, const char **text)
{
    return find_error(error, text, false);
}
