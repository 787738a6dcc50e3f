// SPDX-License-Identifier: BSD-3-Clause
// Contexts, streams, events.
#include <stdlib.h>

#include "driver.h"
#include "faults.h"

enum { STACK = 16 };
static _Thread_local CUcontext stack[STACK];
static _Thread_local unsigned int depth;

struct CUstream_st {
    unsigned int flags;
    CUcontext context;
};

struct CUevent_st {
    uint64_t done_ns;
};

CUcontext current_context(void)
{
    return depth > 0 ? stack[depth - 1] : NULL;
}

static CUresult add_context(CUdevice device)
{
    return device_call(SIM_CONTEXT, driver.visible[device], 1, 0, 0);
}

static bool known(CUdevice device)
{
    return device >= 0 && device < driver.visible_count;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    ENTER;
    if (!context)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (!known(device))
        LEAVE(CUDA_ERROR_INVALID_DEVICE);
    pthread_mutex_lock(&driver.mutex);
    struct CUctx_st *primary = &driver.primary[device];
    CUresult result = primary->references > 0 ? CUDA_SUCCESS : add_context(device);
    if (result == CUDA_SUCCESS) {
        primary->gpu = driver.visible[device];
        primary->primary = true;
        primary->references++;
        *context = primary;
    }
    pthread_mutex_unlock(&driver.mutex);
    LEAVE(result);
}

static void drop_memory(int gpu)
{
    struct allocation **at = &driver.allocations;
    while (*at) {
        struct allocation *one = *at;
        if (one->gpu == gpu) {
            device_call(SIM_FREE, one->gpu, one->address, 0, 0);
            *at = one->next;
            free(one);
        } else {
            at = &one->next;
        }
    }
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    ENTER;
    if (!known(device))
        LEAVE(CUDA_ERROR_INVALID_DEVICE);
    pthread_mutex_lock(&driver.mutex);
    struct CUctx_st *primary = &driver.primary[device];
    CUresult result = primary->references > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    if (result == CUDA_SUCCESS && --primary->references == 0) {
        drop_memory(primary->gpu);
        device_call(SIM_CONTEXT, primary->gpu, 0, 0, 0);
    }
    pthread_mutex_unlock(&driver.mutex);
    LEAVE(result);
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
    ENTER;
    if (!known(device))
        LEAVE(CUDA_ERROR_INVALID_DEVICE);
    if (!flags || !active)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    *flags = driver.primary[device].flags;
    *active = driver.primary[device].references > 0;
    LEAVE(CUDA_SUCCESS);
}

API CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device)
{
    ENTER;
    if (!context)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (!known(device))
        LEAVE(CUDA_ERROR_INVALID_DEVICE);
    struct CUctx_st *made = calloc(1, sizeof(*made));
    CUresult result = made && depth < STACK ? add_context(device) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result != CUDA_SUCCESS) {
        free(made);
        LEAVE(result);
    }
    made->gpu = driver.visible[device];
    made->flags = flags;
    made->references = 1;
    pthread_mutex_lock(&driver.mutex);
    made->next = driver.contexts;
    driver.contexts = made;
    pthread_mutex_unlock(&driver.mutex);
    stack[depth++] = made;
    *context = made;
    LEAVE(CUDA_SUCCESS);
}

API CUresult cuCtxCreate_v4(CUcontext *context, void *parameters, unsigned int flags,
                            CUdevice device)
{
    return parameters ? CUDA_ERROR_NOT_SUPPORTED : cuCtxCreate_v2(context, flags, device);
}

API CUresult cuCtxDestroy_v2(CUcontext context)
{
    ENTER;
    if (!context || context->primary)
        LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    pthread_mutex_lock(&driver.mutex);
    for (struct CUctx_st **at = &driver.contexts; *at; at = &(*at)->next) {
        if (*at == context) {
            *at = context->next;
            break;
        }
    }
    device_call(SIM_CONTEXT, context->gpu, 0, 0, 0);
    pthread_mutex_unlock(&driver.mutex);
    if (depth > 0 && stack[depth - 1] == context)
        depth--;
    free(context);
    LEAVE(CUDA_SUCCESS);
}

API CUresult cuCtxSetCurrent(CUcontext context)
{
    ENTER;
    if (depth > 0)
        depth--;
    if (context)
        stack[depth++] = context;
    LEAVE(CUDA_SUCCESS);
}

API CUresult cuCtxGetCurrent(CUcontext *context)
{
    ENTER;
    if (!context)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    *context = current_context();
    LEAVE(CUDA_SUCCESS);
}

API CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    ENTER;
    if (!context || depth == STACK)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    stack[depth++] = context;
    LEAVE(CUDA_SUCCESS);
}

API CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    ENTER;
    if (depth == 0)
        LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    depth--;
    if (context)
        *context = stack[depth];
    LEAVE(CUDA_SUCCESS);
}

API CUresult cuCtxGetDevice(CUdevice *device)
{
    ENTER;
    CUcontext context = current_context();
    if (!context)
        LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    for (int i = 0; device && i < driver.visible_count; i++)
        if (driver.visible[i] == context->gpu)
            *device = i;
    LEAVE(device ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

API CUresult cuCtxSynchronize(void)
{
    ENTER;
    LEAVE(current_context() ? wait_for_work(0) : CUDA_ERROR_INVALID_CONTEXT);
}

API CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
    ENTER;
    if (!stream)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (!current_context())
        LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    *stream = calloc(1, sizeof(**stream));
    if (*stream)
        **stream = (struct CUstream_st){flags, current_context()};
    LEAVE(*stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

// A stream of the primary context of a GPU, where that is retained. With driver.mutex held.
CUstream stream_of_gpu(int gpu)
{
    for (int device = 0; device < driver.visible_count; device++) {
        struct CUctx_st *primary = &driver.primary[device];
        if (driver.visible[device] != gpu || primary->references == 0)
            continue;
        CUstream stream = calloc(1, sizeof(*stream));
        if (stream)
            stream->context = primary;
        return stream;
    }
    return NULL;
}

API CUresult cuStreamGetCtx(CUstream stream, CUcontext *context)
{
    ENTER;
    if (!stream || !context)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    *context = stream->context;
    LEAVE(CUDA_SUCCESS);
}

API CUresult cuStreamDestroy_v2(CUstream stream)
{
    ENTER;
    free(stream);
    LEAVE(CUDA_SUCCESS);
}

API CUresult cuStreamSynchronize(CUstream stream)
{
    (void)stream; // all streams are one
    ENTER;
    LEAVE(wait_for_work(0));
}

API CUresult cuStreamQuery(CUstream stream)
{
    (void)stream;
    ENTER;
    uint64_t left = 0;
    CUresult result = device_receive(SIM_REMAINING, -1, 0, 0, NULL, 0, &left);
    LEAVE(result == CUDA_SUCCESS && left > 0 ? CUDA_ERROR_NOT_READY : result);
}

API CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
    (void)flags;
    ENTER;
    if (!event)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    *event = calloc(1, sizeof(**event));
    LEAVE(*event ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

API CUresult cuEventDestroy_v2(CUevent event)
{
    ENTER;
    free(event);
    LEAVE(CUDA_SUCCESS);
}

API CUresult cuEventRecord(CUevent event, CUstream stream)
{
    (void)stream;
    ENTER;
    uint64_t left = 0;
    if (!event)
        LEAVE(CUDA_ERROR_INVALID_HANDLE);
    CUresult result = device_receive(SIM_REMAINING, -1, 0, 0, NULL, 0, &left);
    event->done_ns = now_ns() + left;
    LEAVE(result);
}

API CUresult cuEventQuery(CUevent event)
{
    ENTER;
    if (!event)
        LEAVE(CUDA_ERROR_INVALID_HANDLE);
    LEAVE(now_ns() < event->done_ns ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}

API CUresult cuEventSynchronize(CUevent event)
{
    ENTER;
    if (!event)
        LEAVE(CUDA_ERROR_INVALID_HANDLE);
    sleep_until(event->done_ns);
    LEAVE(CUDA_SUCCESS);
}

API CUresult cuEventElapsedTime(float *ms, CUevent start, CUevent end)
{
    ENTER;
    if (!ms || !start || !end)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    *ms = (float)((double)((int64_t)end->done_ns - (int64_t)start->done_ns) / 1e6);
    LEAVE(CUDA_SUCCESS);
}
