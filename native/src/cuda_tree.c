/* SPDX-License-Identifier: BSD-3-Clause */
#include "cuda_tree.h"

#include "cuda_look.h"
#include "cuda_pace.h"
#include "cuda_storage.h"
#include "io.h"

/* Slices in which a lock is tried, seconds: between them it can be given up. They grow, because work that
 * was submitted before must end within one, and while none is under way the process submits more. */
static const double first_slice = 1.0, last_slice = 10.0;

int cuda_tree_to_host(const struct cuda_work *work, const struct cuda_task *task)
{
    struct cuda_checkpoint_args args = {.custom_storage = NULL};
    int error = cuda_alive(work, task) ? work->driver->checkpoint(task->pid, &args) : CUDA_SUCCESS;
    return error == CUDA_SUCCESS || cuda_alive(work, task) ? error : CUDA_SUCCESS;
}

static bool lock(struct cuda_work *work, const struct cuda_task *task, double deadline,
                 struct kc_result *result)
{
    double slice = first_slice;
    for (;;) {
        double asked = io_now();
        double left = deadline - asked;
        double now = slice < left ? slice : left;
        struct cuda_lock_args args = {.timeout_ms = now > 0.001 ? (unsigned)(now * 1000.0) : 1};
        if (cuda_late(work))
            return cuda_too_late(result);
        if (!cuda_step(work, CUDA_OP_LOCK, task->pid, cuda_forward(work, now + cuda_short_call(work))))
            return cuda_cancelled(result);
        int error = cuda_alive(work, task) ? work->driver->lock(task->pid, &args) : CUDA_SUCCESS;
        if (error == CUDA_SUCCESS || !cuda_alive(work, task))
            return true;
        if (error != CUDA_ERROR_NOT_READY)
            return cuda_fail(result, work, KC_GPU_FAILED, error, task, "The GPU could not be halted");
        /* A driver that does not wait is not asked all the time. */
        io_sleep_ms(io_until(asked + now, CUDA_RETRY_MS));
        if (io_now() >= deadline && !cuda_late(work)) {
            char words[256];
            cuda_error_words(work->driver, error, words, sizeof(words));
            return kc_fail(result, KC_GPU_BUSY,
                           "Process %d did not finish its work on the GPU within %.0f s: %s.",
                           task->pid, work->lock_timeout, words);
        }
        slice = slice * 2.0 < last_slice ? slice * 2.0 : last_slice;
    }
}

/* Every process is locked before any is checkpointed, parents first; they may have made new ones. */
static bool lock_all(struct cuda_work *work, struct kc_result *result)
{
    double deadline = io_now() + work->lock_timeout;
    bool more = true;
    while (more) {
        for (size_t i = 0; i < *work->count; i++) {
            struct cuda_task *task = &work->tasks[i];
            if (task->found != CUDA_RUNNING || task->locked)
                continue;
            if (!lock(work, task, deadline, result))
                return false;
            task->locked = true;
        }
        if (!cuda_look_for_new(work, &more, result))
            return false;
    }
    return true;
}

/* One that is locked: into the folder, or into its own memory. */
static bool checkpoint(struct cuda_work *work, struct cuda_task *task, struct kc_result *result)
{
    if (work->store && cuda_alive(work, task)) {
        enum cuda_stored stored = cuda_storage_save(work, task, result);
        if (stored != CUDA_NOT_STORED)
            return stored != CUDA_STORE_FAILED;
        /* This one, and what comes after it, in the way that needs room in the host. */
        work->store = false;
        if (work->host_room != NULL && !work->host_room(work->data))
            return kc_fail(result, KC_NO_MEMORY, "%s", kc_reason_words(KC_NO_MEMORY));
    }
    int error = cuda_tree_to_host(work, task);
    return error == CUDA_SUCCESS || cuda_fail(result, work, KC_GPU_FAILED, error, task,
                                              "The GPU memory could not be copied to the host");
}

static bool checkpoint_all(struct cuda_work *work, struct kc_result *result)
{
    for (size_t i = 0; i < *work->count; i++) {
        struct cuda_task *task = &work->tasks[i];
        if ((task->found != CUDA_RUNNING && task->found != CUDA_LOCKED) || task->copied)
            continue;
        if (cuda_late(work))
            return cuda_too_late(result);
        if (!cuda_step(work, CUDA_OP_CHECKPOINT, task->pid, cuda_forward(work, work->copy_timeout)))
            return cuda_cancelled(result);
        if (work->noting != NULL)
            work->noting(work->data, task, false);
        if (!checkpoint(work, task, result))
            return false;
        task->copied = true;
        if (work->noting != NULL && !task->stored)
            work->noting(work->data, task, true);
    }
    return true;
}

/* Until nobody came while memory was copied. Each time has the transaction's deadline. */
static bool copy_all(struct cuda_work *work, struct kc_result *result)
{
    bool more = true;
    while (more)
        if (!checkpoint_all(work, result) || !cuda_look_for_new(work, &more, result) ||
            (more && !lock_all(work, result)))
            return false;
    return true;
}

bool cuda_tree_freeze(struct cuda_work *work, double *lock_s, double *copy_s,
                      struct kc_result *result)
{
    double started = io_now();
    for (size_t i = 0; i < *work->count; i++)
        work->tasks[i].locked = work->tasks[i].copied = false;
    bool good = lock_all(work, result);
    double locked = io_now();
    *lock_s = locked - started;
    if (good && work->copying != NULL)
        work->copying(work->data, false);
    good = good && copy_all(work, result);
    if (good && work->copying != NULL)
        work->copying(work->data, true);
    *copy_s = io_now() - locked;
    if (good)
        return true;
    struct kc_result undone = {.reason = KC_OK};
    if (!cuda_tree_return(work, &undone)) {
        /* What failed first is of less interest than that the kernel is not well now. */
        struct kc_result first = *result;
        *result = (struct kc_result){.reason = KC_OK};
        kc_fail(result, KC_GPU_STUCK, "%.230s (after: %.200s)", undone.message, first.message);
    }
    return false;
}
