/* SPDX-License-Identifier: BSD-3-Clause */
/* Device memory goes into a file beside the images, and nothing of it is given up before it is safe. */
#include "cuda_storage.h"

#include <errno.h>
#include <linux/magic.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>

#include "cuda_copy.h"
#include "cuda_file.h"
#include "cuda_held.h"
#include "cuda_look.h"
#include "cuda_pace.h"
#include "cuda_parts.h"
#include "io.h"

enum { TRIES = 3 };

static const double asked_again = 1.0; /* seconds after which memory may have become free */

static const uint64_t spare = 64 << 20; /* bytes of the folder that are left for others */

/* What of a process's memory has come where. */
struct sink {
    struct cuda_work *work;
    struct cuda_task *task;
    struct cuda_held *to;
    const struct cuda_storage_info *info;
    uint64_t asked, written; /* bytes for the file; that it has taken */
    int error;               /* of the file */
    bool given_up;           /* it is not waited for any more */
    bool must;               /* it is waited for whatever comes: there is no other place */
    double next_look;        /* when to look again whether there is one */
};

enum outcome { WRITTEN, NOT_WRITTEN, NOT_READ };

bool cuda_storage_room(int folder, uint64_t bytes)
{
    struct statfs kind;
    struct statvfs status;
    if (fstatfs(folder, &kind) != 0 || (uint32_t)kind.f_type == TMPFS_MAGIC ||
        (uint32_t)kind.f_type == RAMFS_MAGIC)
        return false;
    return fstatvfs(folder, &status) == 0 &&
           (uint64_t)status.f_bavail * status.f_frsize >= bytes + spare;
}

int cuda_storage_has(int folder, pid_t pid)
{
    struct cuda_parts parts;
    return cuda_parts_read(folder, pid, &parts);
}

/* Each block may take as long as all of the memory may where the driver copies it itself. */
static bool tell(const struct sink *sink)
{
    return cuda_step(sink->work, CUDA_OP_CHECKPOINT, sink->task->pid, sink->work->copy_timeout);
}

/* Whether to go on with the file. Not where the save is given up, and memory can take all: what the GPU has is
 * there sooner than on a disk that may be slow or hang. */
static bool goes_on(struct sink *sink)
{
    bool wanted = tell(sink) && !cuda_late(sink->work);
    if (wanted || sink->must || io_now() < sink->next_look)
        return true;
    sink->next_look = io_now() + asked_again;
    sink->given_up = cuda_held_take(sink->to, 0, false);
    return !sink->given_up;
}

/* Waits until the file has done what it was asked for. */
static bool is_done(struct sink *sink)
{
    while (!cuda_file_wait(sink->to->file, CUDA_RETRY_MS))
        if (!goes_on(sink))
            return false;
    sink->error = cuda_file_error(sink->to->file);
    if (sink->error == 0)
        sink->written = sink->asked;
    return sink->error == 0;
}

/* One block is on its way from the device while the one before it is written. */
static enum outcome copy_out(struct sink *sink, const struct cuda_storage_part *part,
                             struct kc_result *result)
{
    const struct cuda_driver *driver = sink->work->driver;
    int now = 0;
    int begun = part->size == 0 ? CUDA_SUCCESS
                                : driver->to_host(cuda_block(0), part->address,
                                                  cuda_block_size(part, 0), part->stream);
    for (size_t at = 0; at < part->size; now = 1 - now) {
        size_t size = cuda_block_size(part, at);
        size_t next = at + size;
        int error = begun == CUDA_SUCCESS ? driver->wait_stream(part->stream) : begun;
        if (error != CUDA_SUCCESS)
            error = cuda_copy_block(driver, part, at, size, cuda_block(now), true);
        if (error != CUDA_SUCCESS) {
            cuda_fail(result, sink->work, KC_GPU_FAILED, error, sink->task, "The GPU memory cannot be read");
            return NOT_READ;
        }
        if (!goes_on(sink) || !is_done(sink))
            return NOT_WRITTEN;
        if (next < part->size)
            begun = driver->to_host(cuda_block(1 - now), part->address + next,
                                    cuda_block_size(part, next), part->stream);
        cuda_file_write(sink->to->file, cuda_block(now), size, sink->asked);
        sink->asked += size;
        at = next;
    }
    return is_done(sink) ? WRITTEN : NOT_WRITTEN;
}

/* Errors of writing may show themselves only when all of it is to be on the disk. The GPU still has everything
 * then. The list comes last: without it the file counts for nothing. */
static enum outcome write_file(struct sink *sink, struct kc_result *result)
{
    char text[CUDA_PARTS_TEXT];
    struct cuda_file *file = sink->to->file;
    cuda_blocks_pin(sink->work->driver);
    cuda_file_reserve(file, sink->to->parts.total);
    for (unsigned i = 0; i < sink->info->count; i++) {
        struct cuda_uuid uuid;
        cuda_enter(sink->work->driver, &sink->info->parts[i], &uuid);
        enum outcome outcome = copy_out(sink, &sink->info->parts[i], result);
        if (outcome != WRITTEN)
            return outcome;
    }
    cuda_parts_format(&sink->to->parts, text);
    if (!is_done(sink))
        return NOT_WRITTEN;
    cuda_file_sync(file);
    if (!is_done(sink)) {
        sink->written = 0; /* whatever it took, it has not kept */
        return NOT_WRITTEN;
    }
    cuda_file_list(file, text);
    return is_done(sink) ? WRITTEN : NOT_WRITTEN;
}

/* A place in memory for what is not in the file: for all, where the host has that much. */
static bool make_room(struct sink *sink)
{
    if (sink->to->rest == NULL && !cuda_held_take(sink->to, 0, true)) {
        uint64_t written = sink->written;
        if (written == 0)
            return false;
        sink->must = true; /* what it has must be safe there */
        cuda_file_sync(sink->to->file);
        return is_done(sink) && cuda_held_take(sink->to, written, true);
    }
    cuda_held_leave_file(sink->to);
    return true;
}

static enum outcome copy_to_memory(struct sink *sink, struct kc_result *result)
{
    uint64_t offset = 0;
    if (!make_room(sink)) {
        kc_fail(result, KC_GPU_FAILED,
                "The GPU memory of process %d has room neither in the folder for images nor in the "
                "host's memory.",
                sink->task->pid);
        return NOT_WRITTEN;
    }
    for (unsigned i = 0; i < sink->info->count; i++) {
        const struct cuda_storage_part *part = &sink->info->parts[i];
        struct cuda_uuid uuid;
        cuda_enter(sink->work->driver, part, &uuid);
        for (size_t at = 0; at < part->size;) {
            size_t size = cuda_block_size(part, at);
            int error = CUDA_SUCCESS;
            tell(sink);
            if (offset >= sink->to->in_file)
                error = cuda_copy_block(sink->work->driver, part, at, size,
                                        sink->to->rest + (offset - sink->to->in_file), true);
            if (error != CUDA_SUCCESS) {
                cuda_fail(result, sink->work, KC_GPU_FAILED, error, sink->task,
                          "The GPU memory cannot be read");
                return NOT_READ;
            }
            offset += size;
            at += size;
        }
    }
    return WRITTEN;
}

/* What is shown, part by part. */
static bool list_parts(struct sink *sink, struct kc_result *result)
{
    const struct cuda_storage_info *info = sink->info;
    struct cuda_parts *parts = &sink->to->parts;
    if (info->count > CUDA_GPUS_MAX)
        return kc_fail(result, KC_GPU_FAILED,
                       "Process %d has memory on more GPUs than is possible.", sink->task->pid);
    for (unsigned i = 0; i < info->count; i++) {
        cuda_enter(sink->work->driver, &info->parts[i], &parts->parts[i].uuid);
        parts->parts[i].size = info->parts[i].size;
        parts->total += info->parts[i].size;
        parts->count++;
    }
    return true;
}

/* Says why the file has not got it. */
static void not_written(const struct sink *sink, int error, struct kc_result *result)
{
    if (!sink->given_up)
        kc_fail_errno(result, KC_NO_SPACE, error, "The GPU memory cannot be written");
    else if (cuda_late(sink->work))
        cuda_too_late(result);
    else
        cuda_cancelled(result);
}

/* The driver has shown the memory. From here on there is no way back but on: what is not copied when the driver
 * is told that all is done is lost. */
static enum cuda_stored store(struct sink *sink, struct kc_result *result)
{
    struct cuda_task *task = sink->task;
    if (!list_parts(sink, result))
        return CUDA_STORE_FAILED;
    sink->to->in_file = sink->to->parts.total;
    enum outcome outcome = write_file(sink, result);
    bool in_file = outcome != NOT_WRITTEN;
    int why = sink->error;
    if (!in_file)
        outcome = copy_to_memory(sink, result);
    if (outcome != WRITTEN)
        return CUDA_STORE_FAILED;
    task->stored = true;
    task->memory = (int64_t)sink->to->parts.total;
    tell(sink);
    int error = cuda_complete(sink->work, task, sink->info, CUDA_CHECKPOINTED);
    if (error != CUDA_SUCCESS) {
        cuda_fail(result, sink->work, KC_GPU_FAILED, error, task, "The driver does not end the checkpoint");
        return CUDA_STORE_FAILED;
    }
    task->shown = false;
    if (in_file)
        return CUDA_STORED;
    not_written(sink, why, result);
    return CUDA_STORE_FAILED;
}

/* The state of the process, with patience: much depends on it. CUDA_NONE: the driver does not tell. */
static int state_now(const struct cuda_work *work, const struct cuda_task *task)
{
    int state = CUDA_NONE;
    for (int i = 0; i < TRIES; i++) {
        if (i > 0)
            io_sleep_ms(CUDA_RETRY_MS);
        if (work->driver->get_state(task->pid, &state) == CUDA_SUCCESS)
            return state;
    }
    return CUDA_NONE;
}

/* Asks the driver to show the memory, which it has done where it says so; else its state tells. */
static enum cuda_stored begin(struct sink *sink, struct kc_result *result)
{
    const struct cuda_work *work = sink->work;
    struct cuda_task *task = sink->task;
    struct cuda_storage_info *info = NULL;
    struct cuda_checkpoint_args args = {.custom_storage = &info};
    task->shown = true;
    int error = work->driver->checkpoint(task->pid, &args);
    bool done = error == CUDA_SUCCESS;
    int state = done && info != NULL ? CUDA_CHECKPOINTING : state_now(work, task);
    sink->info = info;
    if (!cuda_alive(work, task))
        return CUDA_STORED;
    if (state == CUDA_CHECKPOINTING && info != NULL)
        return store(sink, result);
    task->shown = state != CUDA_LOCKED && state != CUDA_CHECKPOINTED;
    if (state == CUDA_LOCKED)
        return CUDA_NOT_STORED;
    if (state == CUDA_CHECKPOINTED && done)
        return CUDA_IN_HOST;
    cuda_fail(result, work, KC_GPU_FAILED, done ? CUDA_ERROR_ILLEGAL_STATE : error, task,
              "The driver has begun a checkpoint that it does not show");
    return CUDA_STORE_FAILED;
}

enum cuda_stored cuda_storage_save(struct cuda_work *work, struct cuda_task *task,
                                   struct kc_result *result)
{
    struct sink sink = {.work = work, .task = task, .to = cuda_held_make(task->pid)};
    if (sink.to == NULL)
        return CUDA_NOT_STORED;
    sink.to->file = cuda_file_start(work->folder, task->pid);
    if (sink.to->file == NULL || !cuda_blocks_make()) {
        cuda_held_drop(task->pid);
        return CUDA_NOT_STORED;
    }
    cuda_file_create(sink.to->file, (uint64_t)task->expected);
    bool created = is_done(&sink);
    /* What begins now cannot be taken back. */
    if (created && (cuda_late(work) || !cuda_step(work, CUDA_OP_CHECKPOINT, task->pid,
                                                  cuda_forward(work, work->copy_timeout))))
        sink.given_up = true;
    enum cuda_stored stored = created && !sink.given_up ? begin(&sink, result) : CUDA_NOT_STORED;
    if (stored != CUDA_NOT_STORED && stored != CUDA_IN_HOST)
        return stored;
    if (!sink.given_up) {
        cuda_file_remove(sink.to->file);
        is_done(&sink);
    }
    cuda_held_drop(task->pid);
    if (sink.given_up)
        not_written(&sink, 0, result);
    return sink.given_up ? CUDA_STORE_FAILED : stored;
}
