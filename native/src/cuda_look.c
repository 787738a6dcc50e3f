/* SPDX-License-Identifier: BSD-3-Clause */
#include "cuda_look.h"

#include "cuda_pace.h"

int cuda_state_of(const struct cuda_work *work, const struct cuda_task *task, int *state)
{
    *state = CUDA_NONE;
    if (!cuda_alive(work, task))
        return CUDA_SUCCESS;
    int error = work->driver->get_state(task->pid, state);
    if (error != CUDA_SUCCESS)
        *state = CUDA_NONE;
    return error;
}

bool cuda_fail(struct kc_result *result, const struct cuda_work *work, enum kc_reason reason,
                 int error, const struct cuda_task *task, const char *what)
{
    char words[256];
    cuda_error_words(work->driver, error, words, sizeof(words));
    if (error == CUDA_ERROR_NOT_SUPPORTED && reason != KC_GPU_STUCK)
        return kc_fail(result, KC_GPU_UNSUPPORTED,
                       "%s (process %d): %s. The driver does not support it for unified memory "
                       "(cudaMallocManaged), for memory that processes share (CUDA IPC, as NCCL does), "
                       "or for GPUs in MIG mode or under MPS.",
                       what, task->pid, words);
    return kc_fail(result, reason, "%s (process %d): %s.", what, task->pid, words);
}

static bool initialise(struct cuda_work *work, struct kc_result *result)
{
    char words[256];
    if (!cuda_step(work, CUDA_OP_START, 0, CUDA_START_LIMIT))
        return cuda_cancelled(result);
    int error = work->driver->init(0);
    if (error == CUDA_SUCCESS)
        return true;
    cuda_error_words(work->driver, error, words, sizeof(words));
    return kc_fail(result, KC_GPU_UNSUPPORTED, "The GPU driver does not start: %s.", words);
}

static bool look_at(struct cuda_work *work, struct cuda_task *task, bool expected, bool *started,
                    struct kc_result *result)
{
    if (cuda_late(work))
        return cuda_too_late(result);
    if (!cuda_step(work, CUDA_OP_LOOK, task->pid, cuda_forward(work, cuda_short_call(work))))
        return cuda_cancelled(result);
    int error = cuda_state_of(work, task, &task->found);
    /* Starting the driver takes seconds: only for those that need it. */
    if (!*started && cuda_alive(work, task) &&
        (error == CUDA_SUCCESS || task->holds_device || task->has_thread || expected)) {
        if (!initialise(work, result))
            return false;
        *started = true;
        error = cuda_state_of(work, task, &task->found);
    }
    if (error != CUDA_SUCCESS && (task->has_thread || expected))
        return cuda_fail(result, work, KC_GPU_FAILED, error, task,
                    "The driver cannot reach the GPU state");
    if (error != CUDA_SUCCESS && task->holds_device)
        return kc_fail(result, KC_GPU_UNSUPPORTED,
                       "Process %d was forked from one that used the GPU by then, and keeps its "
                       "devices open: it cannot be saved. Start it before, or by \"spawn\".",
                       task->pid);
    task->parked = task->found == CUDA_CHECKPOINTED;
    if (task->found == CUDA_FAILED)
        return kc_fail(result, KC_GPU_FAILED,
                       "The GPU state of process %d is lost: the driver failed earlier.",
                       task->pid);
    if (task->parked && work->none_parked)
        return kc_fail(result, KC_GPU_FAILED,
                       "The GPU memory of process %d is not with it, though it was not parked: it may be "
                       "lost.",
                       task->pid);
    if (expected && task->found != CUDA_CHECKPOINTED && task->found != CUDA_LOCKED)
        return kc_fail(result, KC_GPU_FAILED,
                       "The GPU state of process %d did not come back with it.", task->pid);
    /* Half done by somebody else, who should finish it. */
    if (task->found == CUDA_CHECKPOINTING || task->found == CUDA_RESTORING)
        return kc_fail(result, KC_GPU_BUSY,
                       "Something else checkpoints or restores the GPU of process %d.",
                       task->pid);
    if (expected)
        task->found = CUDA_RUNNING;
    return true;
}

bool cuda_tree_look(struct cuda_work *work, bool expected, struct kc_result *result)
{
    bool started = false;
    for (size_t i = 0; i < *work->count; i++)
        if (!look_at(work, &work->tasks[i], expected, &started, result))
            return false;
    return true;
}

bool cuda_look_for_new(struct cuda_work *work, bool *found, struct kc_result *result)
{
    bool started = true; /* others use it */
    *found = false;
    if (work->more != NULL && !work->more(work->data, result))
        return false;
    for (size_t i = 0; i < *work->count; i++) {
        struct cuda_task *task = &work->tasks[i];
        if (task->found != CUDA_NONE)
            continue;
        if (!look_at(work, task, false, &started, result))
            return false;
        *found = *found || task->found == CUDA_RUNNING || task->found == CUDA_LOCKED;
    }
    return true;
}

bool cuda_tree_any(const struct cuda_work *work)
{
    for (size_t i = 0; i < *work->count; i++)
        if (work->tasks[i].found != CUDA_NONE)
            return true;
    return false;
}

size_t cuda_tree_gpus(const struct cuda_driver *driver, struct cuda_gpu gpus[CUDA_GPUS_MAX])
{
    int count = 0;
    size_t found = 0;
    if (driver->device_get_count(&count) != CUDA_SUCCESS)
        return 0;
    for (int i = 0; i < count && found < CUDA_GPUS_MAX; i++) {
        struct cuda_gpu *gpu = &gpus[found];
        int device;
        size_t bytes = 0;
        *gpu = (struct cuda_gpu){.free_before = -1, .released = -1};
        if (driver->device_get(&device, i) != CUDA_SUCCESS ||
            driver->device_get_uuid(&gpu->uuid, device) != CUDA_SUCCESS)
            continue;
        driver->device_get_name(gpu->name, sizeof(gpu->name) - 1, device);
        driver->device_total_mem(&bytes, device);
        gpu->memory = bytes;
        found++;
    }
    return found;
}
