// SPDX-License-Identifier: BSD-3-Clause
// Device memory, which lies on the machine, and the copies from and to it.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "driver.h"
#include "faults.h"

enum { BLOCK = 2 << 20 };

CUdeviceptr take_addresses(uint64_t size)
{
    CUdeviceptr address = driver.next_address;
    driver.next_address += (size + 2 * (uint64_t)BLOCK - 1) / BLOCK * BLOCK;
    return address;
}

struct allocation *find_allocation(CUdeviceptr address, uint64_t size)
{
    for (struct allocation *one = driver.allocations; one; one = one->next)
        if (address >= one->address && address - one->address <= one->size &&
            size <= one->size - (address - one->address))
            return one;
    return NULL;
}

// The GPU on which a range lies, or -1.
static int gpu_at(CUdeviceptr address, uint64_t size)
{
    pthread_mutex_lock(&driver.mutex);
    struct allocation *one = find_allocation(address, size);
    int gpu = one ? one->gpu : -1;
    pthread_mutex_unlock(&driver.mutex);
    return gpu;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size)
{
    ENTER;
    CUcontext context = current_context();
    if (!address || size == 0)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (!context)
        LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    struct allocation *made = calloc(1, sizeof(*made));
    if (!made)
        LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    pthread_mutex_lock(&driver.mutex);
    made->gpu = context->gpu;
    made->size = size;
    made->address = take_addresses(size);
    CUresult result = device_call(SIM_ALLOC, made->gpu, made->address, size, 0);
    if (result == CUDA_SUCCESS) {
        *address = made->address;
        made->next = driver.allocations;
        driver.allocations = made;
        made = NULL;
    }
    pthread_mutex_unlock(&driver.mutex);
    free(made);
    LEAVE(result);
}

API CUresult cuMemFree_v2(CUdeviceptr address)
{
    ENTER;
    wait_for_work(0);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.mutex);
    for (struct allocation **at = &driver.allocations; *at; at = &(*at)->next) {
        struct allocation *one = *at;
        if (one->address == address) {
            result = device_call(SIM_FREE, one->gpu, address, 0, 0);
            *at = one->next;
            free(one);
            break;
        }
    }
    pthread_mutex_unlock(&driver.mutex);
    LEAVE(result);
}

API CUresult cuMemGetInfo_v2(size_t *available, size_t *total)
{
    ENTER;
    CUcontext context = current_context();
    if (!available || !total)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (!context)
        LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    uint64_t numbers[2] = {0};
    CUresult result =
        device_receive(SIM_MEMORY, context->gpu, 0, 0, numbers, sizeof(numbers), NULL);
    *available = numbers[0];
    *total = numbers[1];
    LEAVE(result);
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address)
{
    ENTER;
    pthread_mutex_lock(&driver.mutex);
    struct allocation *one = find_allocation(address, 1);
    if (one && base)
        *base = one->address;
    if (one && size)
        *size = one->size;
    pthread_mutex_unlock(&driver.mutex);
    LEAVE(one ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND);
}

static CUresult write_device(CUdeviceptr to, const void *from, size_t size)
{
    int gpu = gpu_at(to, size);
    if (gpu < 0 || (!from && size))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = wait_for_work(0);
    return result == CUDA_SUCCESS ? device_send(SIM_WRITE, gpu, to, 0, from, size) : result;
}

static CUresult read_device(void *to, CUdeviceptr from, size_t size)
{
    int gpu = gpu_at(from, size);
    if (gpu < 0 || (!to && size))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = wait_for_work(0);
    return result == CUDA_SUCCESS ? device_receive(SIM_READ, gpu, from, size, to, size, NULL)
                                  : result;
}

static CUresult copy_device(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    int gpu = gpu_at(to, size);
    if (gpu < 0 || gpu_at(from, size) < 0)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = wait_for_work(0);
    return result == CUDA_SUCCESS ? device_call(SIM_COPY, gpu, to, from, size) : result;
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size)
{
    ENTER;
    LEAVE(current_context() ? write_device(to, from, size) : CUDA_ERROR_INVALID_CONTEXT);
}

API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size)
{
    ENTER;
    LEAVE(current_context() ? read_device(to, from, size) : CUDA_ERROR_INVALID_CONTEXT);
}

API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    ENTER;
    LEAVE(current_context() ? copy_device(to, from, size) : CUDA_ERROR_INVALID_CONTEXT);
}

// Copies to a stream wait for it: nothing is asynchronous here but kernels.
API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream)
{
    (void)stream;
    ENTER;
    LEAVE(current_context() ? write_device(to, from, size) : CUDA_ERROR_INVALID_CONTEXT);
}

API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream)
{
    (void)stream;
    ENTER;
    LEAVE(current_context() ? read_device(to, from, size) : CUDA_ERROR_INVALID_CONTEXT);
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    (void)stream;
    ENTER;
    LEAVE(current_context() ? copy_device(to, from, size) : CUDA_ERROR_INVALID_CONTEXT);
}

static CUresult set_device(CUdeviceptr to, unsigned int value, size_t count, unsigned int width)
{
    int gpu = gpu_at(to, count * width);
    if (gpu < 0)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = wait_for_work(0);
    return result == CUDA_SUCCESS
               ? device_call(SIM_SET, gpu, to, count, (uint64_t)width << 32 | value)
               : result;
}

API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count)
{
    ENTER;
    LEAVE(set_device(to, value, count, 1));
}

API CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned int value, size_t count)
{
    ENTER;
    LEAVE(set_device(to, value, count, 4));
}

// Memory of the host that the driver gives out: it stays what it is while the process is locked.
static void *host_memory(size_t size)
{
    void *address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return address == MAP_FAILED ? NULL : address;
}

API CUresult cuMemHostAlloc(void **address, size_t size, unsigned int flags)
{
    (void)flags;
    ENTER;
    if (!address || size == 0)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    *address = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    LEAVE(*address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

API CUresult cuMemAllocHost_v2(void **address, size_t size)
{
    return cuMemHostAlloc(address, size, 0);
}

API CUresult cuMemFreeHost(void *address)
{
    ENTER;
    free(address);
    LEAVE(CUDA_SUCCESS);
}

// Nothing is copied faster from memory that stays in place.
API CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned int flags)
{
    (void)flags;
    ENTER;
    if (!address || size == 0)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    LEAVE(current_context() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT);
}

// Unified memory: the process can be locked, but not checkpointed.
API CUresult cuMemAllocManaged(CUdeviceptr *address, size_t size, unsigned int flags)
{
    (void)flags;
    ENTER;
    if (!address || size == 0)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (!current_context())
        LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    void *memory = host_memory(size);
    if (!memory)
        LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    *address = (CUdeviceptr)(uintptr_t)memory;
    driver.managed = true;
    LEAVE(CUDA_SUCCESS);
}

API CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    ENTER;
    if (!handle || gpu_at(address, 1) < 0)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    memset(handle, 0, sizeof(*handle));
    memcpy(handle->reserved, &address, sizeof(address));
    driver.ipc = true;
    LEAVE(CUDA_SUCCESS);
}
