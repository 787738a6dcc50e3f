/* SPDX-License-Identifier: BSD-3-Clause */
/* All processes of a tree get their GPU back, whatever has become of them. */
#include "cuda_tree.h"

#include <string.h>

#include "cuda_look.h"
#include "cuda_pace.h"
#include "cuda_storage.h"
#include "io.h"

/* What has become of a task with CUDA state. False when the driver does not tell: it may still be locked. */
static bool look_again(struct cuda_work *work, const struct cuda_task *task, int *state,
                       struct kc_result *result)
{
    cuda_step(work, CUDA_OP_LOOK, task->pid, cuda_short_call(work));
    int error = cuda_state_of(work, task, state);
    return error == CUDA_SUCCESS || !cuda_alive(work, task) ||
           cuda_fail(result, work, KC_GPU_STUCK, error, task, "The GPU state cannot be reached any more");
}

/* Waits while the driver is in the middle of something that this program no longer waits for. */
static bool settled_state(struct cuda_work *work, const struct cuda_task *task, int *state,
                          struct kc_result *result)
{
    /* What is shown to a process that has ended, or has given up, hardly anything ends. */
    double deadline = io_now() + (task->shown ? cuda_short_call(work) : work->copy_timeout);
    while (look_again(work, task, state, result)) {
        if (*state != CUDA_CHECKPOINTING && *state != CUDA_RESTORING)
            return true;
        if (io_now() >= deadline)
            return kc_fail(result, KC_GPU_STUCK, "The GPU driver does not finish with process %d.",
                           task->pid);
        io_sleep_ms(CUDA_RETRY_MS);
    }
    return false;
}

/* What the waiting for room may still take, for all processes together. */
struct patience {
    bool within; /* the transaction's deadline counts */
    double left; /* seconds */
};

static bool restore(struct cuda_work *work, struct cuda_task *task, struct patience *patience,
                    struct kc_result *result)
{
    double failed_at = 0.0;
    struct cuda_storage_info *info = NULL;
    struct cuda_gpu_pair pairs[CUDA_GPUS_MAX];
    struct cuda_restore_args args = {.pair_count = (unsigned)work->pair_count};
    int first = CUDA_SUCCESS;
    if (work->pair_count > 0) {
        memcpy(pairs, work->pairs, work->pair_count * sizeof(pairs[0]));
        args.pairs = pairs;
    }
    if (task->stored && !work->driver->custom_storage)
        return kc_fail(result, KC_GPU_UNSUPPORTED,
                       "The GPU memory of process %d was saved straight to the store, and the NVIDIA driver "
                       "here cannot take it from there: that takes CUDA 13.4.",
                       task->pid);
    if (task->stored)
        args.custom_storage = &info;
    for (;;) {
        cuda_step(work, CUDA_OP_RESTORE, task->pid,
             patience->within ? cuda_forward(work, work->copy_timeout) : work->copy_timeout);
        task->shown = task->stored;
        int error = cuda_alive(work, task) ? work->driver->restore(task->pid, &args) : CUDA_SUCCESS;
        if (failed_at > 0.0)
            patience->left -= io_now() - failed_at;
        if (!cuda_alive(work, task) || (error == CUDA_SUCCESS && !task->stored))
            return true;
        if (error == CUDA_SUCCESS && info != NULL)
            return cuda_storage_load(work, task, info, result);
        task->shown = false;
        failed_at = io_now();
        if (error != CUDA_ERROR_OUT_OF_MEMORY && first == CUDA_SUCCESS)
            return cuda_fail(result, work, KC_GPU_FAILED, error, task, "The GPU could not be taken again");
        /* Some drivers cannot do it any more once it has failed so. */
        if (error != CUDA_ERROR_OUT_OF_MEMORY || patience->left <= 0.0 ||
            (patience->within && cuda_late(work)))
            return cuda_fail(result, work, KC_GPU_FULL, CUDA_ERROR_OUT_OF_MEMORY, task,
                        "The GPU has no room for the memory");
        first = error;
        io_sleep_ms(CUDA_RETRY_MS);
    }
}

/* A restore that finds no room cannot be repeated: so room is waited for. */
static bool wait_for_room(struct cuda_work *work, const struct cuda_task *task,
                          struct patience *patience)
{
    double deadline = io_now() + patience->left;
    while (work->room != NULL && !work->room(work->data)) {
        patience->left = deadline - io_now();
        if (patience->left <= 0.0 || (patience->within && cuda_late(work)))
            return false;
        cuda_step(work, CUDA_OP_RESTORE, task->pid, cuda_short_call(work));
        io_sleep_ms(CUDA_RETRY_MS);
    }
    return true;
}

static bool unlock(struct cuda_work *work, const struct cuda_task *task, struct kc_result *result)
{
    struct cuda_unlock_args args = {.reserved = {0}};
    cuda_step(work, CUDA_OP_UNLOCK, task->pid, cuda_short_call(work));
    int error = cuda_alive(work, task) ? work->driver->unlock(task->pid, &args) : CUDA_SUCCESS;
    return error == CUDA_SUCCESS || !cuda_alive(work, task) ||
           cuda_fail(result, work, KC_GPU_STUCK, error, task, "The GPU could not be unlocked");
}

static bool restore_all(struct cuda_work *work, struct patience *patience, struct kc_result *result)
{
    bool good = true;
    bool waited = false;
    for (size_t i = 0; i < *work->count; i++) {
        struct cuda_task *task = &work->tasks[i];
        if (task->found != CUDA_RUNNING && task->found != CUDA_LOCKED)
            continue;
        int state;
        if (!settled_state(work, task, &state, result)) {
            good = false;
            continue;
        }
        if (state == CUDA_CHECKPOINTED && task->stored && work->driver->custom_storage) {
            cuda_step(work, CUDA_OP_RESTORE, task->pid, CUDA_START_LIMIT);
            cuda_storage_contexts(work->driver); /* of those in vain the driver will tell */
        }
        if (state == CUDA_CHECKPOINTED && !waited) {
            wait_for_room(work, task, patience); /* in vain it is tried even so */
            waited = true;
        }
        if (state == CUDA_CHECKPOINTED && patience->within && cuda_late(work))
            return kc_fail(result, KC_TIMEOUT,
                           "The GPU could not be taken again in time; the kernel stays parked.");
        if (state == CUDA_CHECKPOINTED && !restore(work, task, patience, result))
            good = false;
        else if (state == CUDA_FAILED)
            good = kc_fail(result, KC_GPU_STUCK,
                           "The GPU driver has given up the GPU state of process %d.", task->pid);
    }
    return good;
}

static bool unlock_all(struct cuda_work *work, struct kc_result *result)
{
    bool good = true;
    /* Children first: when a parent goes on, they are ready for it. */
    for (size_t i = *work->count; i-- > 0;) {
        const struct cuda_task *task = &work->tasks[i];
        int state;
        if (task->found != CUDA_RUNNING)
            continue;
        if (!look_again(work, task, &state, result) ||
            (state == CUDA_LOCKED && !unlock(work, task, result)))
            good = false;
    }
    return good;
}

bool cuda_tree_return(struct cuda_work *work, struct kc_result *result)
{
    struct patience patience = {.within = false, .left = work->retry_for};
    bool good = restore_all(work, &patience, result);
    return unlock_all(work, result) && good;
}

bool cuda_tree_unpark(struct cuda_work *work, struct kc_result *result)
{
    struct kc_result undone = {.reason = KC_OK};
    struct patience patience = {.within = true, .left = work->retry_for};
    for (size_t i = 0; i < *work->count; i++)
        if (work->tasks[i].parked && !wait_for_room(work, &work->tasks[i], &patience))
            return kc_fail(result, KC_GPU_FULL,
                           "The GPU has no room for the memory of process %d. Nothing was tried.",
                           work->tasks[i].pid);
        else if (work->tasks[i].parked)
            break;
    for (size_t i = 0; i < *work->count; i++)
        if (work->tasks[i].found == CUDA_CHECKPOINTED || work->tasks[i].found == CUDA_LOCKED)
            work->tasks[i].found = CUDA_RUNNING;
    if (restore_all(work, &patience, result))
        return unlock_all(work, result);
    for (size_t i = 0; i < *work->count; i++) {
        const struct cuda_task *task = &work->tasks[i];
        int state;
        if (!task->parked || !settled_state(work, task, &state, &undone) || state != CUDA_LOCKED)
            continue;
        cuda_step(work, CUDA_OP_CHECKPOINT, task->pid, work->copy_timeout);
        int error = cuda_tree_to_host(work, task);
        if (error != CUDA_SUCCESS)
            cuda_fail(&undone, work, KC_GPU_STUCK, error, task, "The GPU could not be freed again");
    }
    if (undone.reason != KC_OK)
        *result = undone;
    return false;
}
