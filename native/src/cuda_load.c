/* SPDX-License-Identifier: BSD-3-Clause */
/* Stored device memory comes back to the GPU. */
#include "cuda_storage.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda_copy.h"
#include "cuda_file.h"
#include "cuda_held.h"
#include "cuda_look.h"
#include "cuda_pace.h"
#include "cuda_parts.h"
#include "io.h"

struct source {
    int file;
    const unsigned char *rest; /* NULL: all is in the file */
    uint64_t in_file;
};

static bool read_block(const struct source *source, unsigned char *block, size_t size, uint64_t at)
{
    size_t done = 0;
    while (done < size && at + done < source->in_file) {
        uint64_t left = source->in_file - (at + done);
        size_t most = size - done < left ? size - done : (size_t)left;
        ssize_t n = pread(source->file, block + done, most, (off_t)(at + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        done += (size_t)n;
    }
    if (done < size && source->rest == NULL)
        return false;
    if (done < size)
        memcpy(block + done, source->rest + (at + done - source->in_file), size - done);
    return true;
}

/* One block is read while the one before it is on its way to the device. */
static bool copy_in(struct cuda_work *work, const struct cuda_task *task,
                    const struct cuda_storage_part *part, const struct source *source,
                    uint64_t offset, struct kc_result *result)
{
    const struct cuda_driver *driver = work->driver;
    int now = 0;
    bool good = part->size == 0 || read_block(source, cuda_block(0), cuda_block_size(part, 0), offset);
    for (size_t at = 0; good && at < part->size; now = 1 - now) {
        size_t size = cuda_block_size(part, at);
        size_t next = at + size;
        cuda_step(work, CUDA_OP_RESTORE, task->pid, work->copy_timeout);
        int error = driver->to_device(part->address + at, cuda_block(now), size, part->stream);
        if (next < part->size)
            good = read_block(source, cuda_block(1 - now), cuda_block_size(part, next), offset + next);
        if (error == CUDA_SUCCESS)
            error = driver->wait_stream(part->stream);
        if (error != CUDA_SUCCESS)
            error = cuda_copy_block(driver, part, at, size, cuda_block(now), false);
        if (error != CUDA_SUCCESS)
            return cuda_fail(result, work, KC_GPU_FAILED, error, task,
                             "The GPU memory cannot be written back");
        at = next;
    }
    return good || kc_fail(result, KC_GPU_FAILED,
                           "The GPU memory of process %d cannot be read back from its file.",
                           task->pid);
}

static bool fill(struct cuda_work *work, const struct cuda_task *task,
                 const struct cuda_storage_info *info, const struct cuda_parts *kept,
                 const struct source *source, struct kc_result *result)
{
    bool used[CUDA_GPUS_MAX] = {false};
    for (unsigned i = 0; i < info->count; i++) {
        struct cuda_uuid here;
        uint64_t offset = 0;
        cuda_enter(work->driver, &info->parts[i], &here);
        size_t found = cuda_parts_find(work, kept, i, &here);
        if (info->count != kept->count || found >= kept->count || used[found] ||
            kept->parts[found].size != info->parts[i].size)
            return kc_fail(result, KC_GPU_FAILED,
                           "The GPU memory that was kept of process %d is not what the driver wants back.",
                           task->pid);
        used[found] = true;
        for (size_t k = 0; k < found; k++)
            offset += kept->parts[k].size;
        if (!copy_in(work, task, &info->parts[i], source, offset, result))
            return false;
    }
    return info->count == kept->count ||
           kc_fail(result, KC_GPU_FAILED, "The driver does not want all of the GPU memory of process %d back.",
                   task->pid);
}

bool cuda_storage_load(struct cuda_work *work, struct cuda_task *task,
                       const struct cuda_storage_info *info, struct kc_result *result)
{
    static struct cuda_parts kept;
    const struct cuda_held *own = cuda_held_find(task->pid);
    struct source source = {.file = -1};
    struct stat status;
    bool good = true;
    if (own != NULL) {
        kept = own->parts;
        source = (struct source){.file = own->file != NULL ? cuda_file_fd(own->file) : -1,
                                 .rest = own->rest,
                                 .in_file = own->in_file};
    } else {
        source.file = cuda_file_open(work->folder, task->pid, "", O_RDONLY);
        good = source.file >= 0 && fstat(source.file, &status) == 0 && S_ISREG(status.st_mode) &&
               cuda_parts_read(work->folder, task->pid, &kept) == 1 &&
               (uint64_t)status.st_size == kept.total;
        source.in_file = kept.total;
    }
    if (!good)
        kc_fail(result, KC_GPU_FAILED, "The GPU memory of process %d is not all there.", task->pid);
    else if (!cuda_blocks_make())
        good = kc_fail(result, KC_NO_MEMORY, "There is no memory to copy the GPU's through.");
    if (good)
        cuda_blocks_pin(work->driver);
    good = good && fill(work, task, info, &kept, &source, result);
    if (own == NULL)
        io_close(&source.file);
    if (!good)
        return !cuda_alive(work, task);
    cuda_step(work, CUDA_OP_RESTORE, task->pid, work->copy_timeout);
    int error = cuda_complete(work, task, info, CUDA_LOCKED);
    task->shown = error != CUDA_SUCCESS;
    if (error == CUDA_SUCCESS)
        cuda_held_drop(task->pid);
    return error == CUDA_SUCCESS ||
           cuda_fail(result, work, KC_GPU_FAILED, error, task, "The driver does not end the restore");
}
