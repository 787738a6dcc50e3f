/* SPDX-License-Identifier: BSD-3-Clause */
#include "cuda_tree.h"

#include <stdio.h>
#include <string.h>

#include "cuda_storage.h"
#include "io.h"

static const double longest_short_call = 20.0; /* seconds for one that only asks or unlocks */
/* Slices in which a lock is tried, seconds: between them it can be given up. They grow, because work that
 * was submitted before must end within one, and while none is under way the process submits more. */
static const double first_slice = 1.0, last_slice = 10.0;
static const int retry_ms = 100;

static double short_call(const struct cuda_work *work)
{
    return work->copy_timeout < longest_short_call ? work->copy_timeout : longest_short_call;
}

static bool step(struct cuda_work *work, enum cuda_op op, pid_t pid, double limit)
{
    return work->step == NULL || work->step(work->data, op, pid, limit);
}

/* What a call that goes forward may take: none of them goes beyond the deadline for all, but for a grace. */
static double forward(const struct cuda_work *work, double most)
{
    double grace = work->copy_timeout < CUDA_GRACE ? work->copy_timeout : CUDA_GRACE;
    double left = work->deadline - io_now();
    if (work->deadline <= 0.0)
        return most;
    return (left < 0.0 ? 0.0 : left < most ? left : most) + grace;
}

static bool late(const struct cuda_work *work)
{
    return work->deadline > 0.0 && io_now() >= work->deadline;
}

static bool too_late(struct kc_result *result)
{
    return kc_fail(result, KC_TIMEOUT, "What is done on the GPU took too long, and was undone.");
}

static bool cancelled(struct kc_result *result)
{
    return kc_fail(result, KC_CANCELLED, "The save was cancelled; the kernel runs on.");
}

/* Asked before each call that changes something, too: a number may be another process's by then. */
static bool alive(const struct cuda_work *work, const struct cuda_task *task)
{
    return work->alive == NULL || work->alive(task);
}

static int checkpoint(const struct cuda_work *work, const struct cuda_task *task)
{
    struct cuda_checkpoint_args args = {.custom_storage = NULL};
    int error = alive(work, task) ? work->driver->checkpoint(task->pid, &args) : CUDA_SUCCESS;
    return error == CUDA_SUCCESS || alive(work, task) ? error : CUDA_SUCCESS;
}

static int state_of(const struct cuda_work *work, const struct cuda_task *task, int *state)
{
    *state = CUDA_NONE;
    if (!alive(work, task))
        return CUDA_SUCCESS;
    int error = work->driver->get_state(task->pid, state);
    if (error != CUDA_SUCCESS)
        *state = CUDA_NONE;
    return error;
}

static bool fail(struct kc_result *result, const struct cuda_work *work, enum kc_reason reason,
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
    if (!step(work, CUDA_OP_START, 0, CUDA_START_LIMIT))
        return cancelled(result);
    int error = work->driver->init(0);
    if (error == CUDA_SUCCESS)
        return true;
    cuda_error_words(work->driver, error, words, sizeof(words));
    return kc_fail(result, KC_GPU_UNSUPPORTED, "The GPU driver does not start: %s.", words);
}

static bool look_at(struct cuda_work *work, struct cuda_task *task, bool expected, bool *started,
                    struct kc_result *result)
{
    if (late(work))
        return too_late(result);
    if (!step(work, CUDA_OP_LOOK, task->pid, forward(work, short_call(work))))
        return cancelled(result);
    int error = state_of(work, task, &task->found);
    /* Starting the driver takes seconds: only for those that need it. */
    if (!*started && alive(work, task) &&
        (error == CUDA_SUCCESS || task->holds_device || task->has_thread || expected)) {
        if (!initialise(work, result))
            return false;
        *started = true;
        error = state_of(work, task, &task->found);
    }
    if (error != CUDA_SUCCESS && (task->has_thread || expected))
        return fail(result, work, KC_GPU_FAILED, error, task,
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

static bool lock(struct cuda_work *work, const struct cuda_task *task, double deadline,
                 struct kc_result *result)
{
    double slice = first_slice;
    for (;;) {
        double asked = io_now();
        double left = deadline - asked;
        double now = slice < left ? slice : left;
        struct cuda_lock_args args = {.timeout_ms = now > 0.001 ? (unsigned)(now * 1000.0) : 1};
        if (late(work))
            return too_late(result);
        if (!step(work, CUDA_OP_LOCK, task->pid, forward(work, now + short_call(work))))
            return cancelled(result);
        int error = alive(work, task) ? work->driver->lock(task->pid, &args) : CUDA_SUCCESS;
        if (error == CUDA_SUCCESS || !alive(work, task))
            return true;
        if (error != CUDA_ERROR_NOT_READY)
            return fail(result, work, KC_GPU_FAILED, error, task, "The GPU could not be halted");
        /* A driver that does not wait is not asked all the time. */
        io_sleep_ms(io_until(asked + now, retry_ms));
        if (io_now() >= deadline && !late(work)) {
            char words[256];
            cuda_error_words(work->driver, error, words, sizeof(words));
            return kc_fail(result, KC_GPU_BUSY,
                           "Process %d did not finish its work on the GPU within %.0f s: %s.",
                           task->pid, work->lock_timeout, words);
        }
        slice = slice * 2.0 < last_slice ? slice * 2.0 : last_slice;
    }
}

/* Whoever came, or began with CUDA, since all were looked at. `found`: one with which something is to be
 * done. */
static bool find_new(struct cuda_work *work, bool *found, struct kc_result *result)
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
        if (!find_new(work, &more, result))
            return false;
    }
    return true;
}

static bool checkpoint_all(struct cuda_work *work, struct kc_result *result)
{
    for (size_t i = 0; i < *work->count; i++) {
        struct cuda_task *task = &work->tasks[i];
        if ((task->found != CUDA_RUNNING && task->found != CUDA_LOCKED) || task->copied)
            continue;
        if (late(work))
            return too_late(result);
        if (!step(work, CUDA_OP_CHECKPOINT, task->pid, forward(work, work->copy_timeout)))
            return cancelled(result);
        if (work->store && alive(work, task)) {
            enum cuda_stored stored = cuda_storage_save(work, task, result);
            if (stored == CUDA_STORE_FAILED)
                return false;
            task->copied = stored != CUDA_NOT_STORED;
            if (task->copied)
                continue;
            /* This one, and what comes after it, in the way that needs room in the host. */
            work->store = false;
            if (work->host_room != NULL && !work->host_room(work->data))
                return kc_fail(result, KC_NO_MEMORY, "%s", kc_reason_words(KC_NO_MEMORY));
        }
        int64_t before = work->host_memory != NULL ? work->host_memory(task->pid) : -1;
        int error = checkpoint(work, task);
        if (error != CUDA_SUCCESS)
            return fail(result, work, KC_GPU_FAILED, error, task,
                        "The GPU memory could not be copied to the host");
        task->copied = true;
        if (before >= 0) {
            int64_t after = work->host_memory(task->pid);
            task->memory = after > before ? after - before : 0;
        }
    }
    return true;
}

/* Until nobody came while memory was copied. Each time has the transaction's deadline. */
static bool copy_all(struct cuda_work *work, struct kc_result *result)
{
    bool more = true;
    while (more)
        if (!checkpoint_all(work, result) || !find_new(work, &more, result) ||
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

/* What has become of a task with CUDA state. False when the driver does not tell: it may still be locked. */
static bool look_again(struct cuda_work *work, const struct cuda_task *task, int *state,
                       struct kc_result *result)
{
    step(work, CUDA_OP_LOOK, task->pid, short_call(work));
    int error = state_of(work, task, state);
    return error == CUDA_SUCCESS || !alive(work, task) ||
           fail(result, work, KC_GPU_STUCK, error, task, "The GPU state cannot be reached any more");
}

/* Waits while the driver is in the middle of something that this program no longer waits for. */
static bool settled_state(struct cuda_work *work, const struct cuda_task *task, int *state,
                          struct kc_result *result)
{
    /* What is shown to a process that has ended, or has given up, hardly anything ends. */
    double deadline = io_now() + (task->shown ? short_call(work) : work->copy_timeout);
    while (look_again(work, task, state, result)) {
        if (*state != CUDA_CHECKPOINTING && *state != CUDA_RESTORING)
            return true;
        if (io_now() >= deadline)
            return kc_fail(result, KC_GPU_STUCK, "The GPU driver does not finish with process %d.",
                           task->pid);
        io_sleep_ms(retry_ms);
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
        step(work, CUDA_OP_RESTORE, task->pid,
             patience->within ? forward(work, work->copy_timeout) : work->copy_timeout);
        task->shown = task->stored;
        int error = alive(work, task) ? work->driver->restore(task->pid, &args) : CUDA_SUCCESS;
        if (failed_at > 0.0)
            patience->left -= io_now() - failed_at;
        if (!alive(work, task) || (error == CUDA_SUCCESS && !task->stored))
            return true;
        if (error == CUDA_SUCCESS && info != NULL)
            return cuda_storage_load(work, task, info, result);
        task->shown = false;
        failed_at = io_now();
        if (error != CUDA_ERROR_OUT_OF_MEMORY && first == CUDA_SUCCESS)
            return fail(result, work, KC_GPU_FAILED, error, task, "The GPU could not be taken again");
        /* Some drivers cannot do it any more once it has failed so. */
        if (error != CUDA_ERROR_OUT_OF_MEMORY || patience->left <= 0.0 ||
            (patience->within && late(work)))
            return fail(result, work, KC_GPU_FULL, CUDA_ERROR_OUT_OF_MEMORY, task,
                        "The GPU has no room for the memory");
        first = error;
        io_sleep_ms(retry_ms);
    }
}

/* A restore that finds no room cannot be repeated: so room is waited for. */
static bool wait_for_room(struct cuda_work *work, const struct cuda_task *task,
                          struct patience *patience)
{
    double deadline = io_now() + patience->left;
    while (work->room != NULL && !work->room(work->data)) {
        patience->left = deadline - io_now();
        if (patience->left <= 0.0 || (patience->within && late(work)))
            return false;
        step(work, CUDA_OP_RESTORE, task->pid, short_call(work));
        io_sleep_ms(retry_ms);
    }
    return true;
}

static bool unlock(struct cuda_work *work, const struct cuda_task *task, struct kc_result *result)
{
    struct cuda_unlock_args args = {.reserved = {0}};
    step(work, CUDA_OP_UNLOCK, task->pid, short_call(work));
    int error = alive(work, task) ? work->driver->unlock(task->pid, &args) : CUDA_SUCCESS;
    return error == CUDA_SUCCESS || !alive(work, task) ||
           fail(result, work, KC_GPU_STUCK, error, task, "The GPU could not be unlocked");
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
            step(work, CUDA_OP_RESTORE, task->pid, CUDA_START_LIMIT);
            cuda_storage_contexts(work->driver); /* of those in vain the driver will tell */
        }
        if (state == CUDA_CHECKPOINTED && !waited) {
            wait_for_room(work, task, patience); /* in vain it is tried even so */
            waited = true;
        }
        if (state == CUDA_CHECKPOINTED && patience->within && late(work))
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
        step(work, CUDA_OP_CHECKPOINT, task->pid, work->copy_timeout);
        int error = checkpoint(work, task);
        if (error != CUDA_SUCCESS)
            fail(&undone, work, KC_GPU_STUCK, error, task, "The GPU could not be freed again");
    }
    if (undone.reason != KC_OK)
        *result = undone;
    return false;
}
