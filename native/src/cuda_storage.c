/* SPDX-License-Identifier: BSD-3-Clause */
#include "cuda_storage.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "hostmem.h"
#include "io.h"

enum { BLOCK = 16 << 20, TRIES = 3, LINE = 80, NAME = 40 };
enum { PIN_FOR_ALL = 1 }; /* in every context */

static const uint64_t spare = 64 << 20; /* bytes that are left for others: in the folder, and in memory */
static const int retry_ms = 100;

/* The device memory of one process, part by part, in the order of its file. */
struct kept {
    size_t count;
    struct {
        struct cuda_uuid uuid;
        uint64_t size;
    } parts[CUDA_GPUS_MAX];
    uint64_t total;
};

/* What this process has stored and not brought back: its file is held open, because whoever began the save may
 * be gone by now, and have removed the folder. */
static struct held {
    pid_t pid;
    int file;
    struct kept kept;
    uint64_t in_file;    /* bytes */
    unsigned char *rest; /* what the file did not take, and nobody else has; NULL: nothing */
    struct held *next;
} *held;

static struct held **find_held(pid_t pid)
{
    struct held **at = &held;
    while (*at != NULL && (*at)->pid != pid)
        at = &(*at)->next;
    return at;
}

static void let_go(pid_t pid)
{
    struct held **at = find_held(pid);
    struct held *one = *at;
    if (one == NULL)
        return;
    *at = one->next;
    if (one->rest != NULL)
        munmap(one->rest, one->kept.total - one->in_file);
    io_close(&one->file);
    free(one);
}

static unsigned char *blocks[2];

/* The driver makes them its own (pinned) if it can; else it copies more slowly. */
static bool make_blocks(void)
{
    if (blocks[0] != NULL)
        return true;
    void *memory = mmap(NULL, (size_t)2 * BLOCK, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED)
        return false;
    blocks[0] = memory;
    blocks[1] = blocks[0] + BLOCK;
    return true;
}

static void pin_blocks(const struct cuda_driver *driver)
{
    static bool tried;
    if (!tried)
        driver->pin(blocks[0], (size_t)2 * BLOCK, PIN_FOR_ALL);
    tried = true;
}

/* Files ------------------------------------------------------------------------------------------ */

static int open_file(int folder, pid_t pid, const char *end, int flags)
{
    char name[NAME];
    snprintf(name, sizeof(name), "gpu-memory-%d%s", pid, end);
    return openat(folder, name, flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
}

static void remove_file(int folder, pid_t pid, const char *end)
{
    char name[NAME];
    snprintf(name, sizeof(name), "gpu-memory-%d%s", pid, end);
    unlinkat(folder, name, 0);
}

/* A new one: what is there may be another's, or be read by others. */
static int make_file(int folder, pid_t pid, const char *end, int flags)
{
    remove_file(folder, pid, end);
    return open_file(folder, pid, end, flags | O_CREAT | O_EXCL);
}

static bool write_parts(int folder, pid_t pid, const struct kept *kept)
{
    int fd = make_file(folder, pid, ".parts", O_WRONLY);
    bool done = fd >= 0;
    for (size_t i = 0; done && i < kept->count; i++) {
        char line[LINE], uuid[CUDA_UUID_TEXT];
        cuda_format_uuid(&kept->parts[i].uuid, uuid);
        int length = snprintf(line, sizeof(line), "%s %" PRIu64 "\n", uuid, kept->parts[i].size);
        done = io_write_all(fd, line, (size_t)length);
    }
    io_close(&fd);
    return done;
}

/* 1, or 0 where there is no such list, or -1. */
static int read_parts(int folder, pid_t pid, struct kept *kept)
{
    char name[NAME], text[CUDA_GPUS_MAX * LINE];
    *kept = (struct kept){.count = 0};
    snprintf(name, sizeof(name), "gpu-memory-%d.parts", pid);
    if (io_read_file_at(folder, name, text, sizeof(text)) < 0)
        return errno == ENOENT ? 0 : -1;
    for (const char *at = text; *at != '\0'; kept->count++) {
        char *end;
        struct cuda_uuid uuid;
        if (kept->count == CUDA_GPUS_MAX || !cuda_parse_uuid(at, ' ', &uuid))
            return -1;
        at += CUDA_UUID_TEXT;
        if (at[-1] != ' ' || *at < '0' || *at > '9')
            return -1;
        errno = 0;
        uint64_t size = strtoull(at, &end, 10);
        if (errno != 0 || *end != '\n' || size > (uint64_t)INT64_MAX - kept->total)
            return -1;
        kept->parts[kept->count].uuid = uuid;
        kept->parts[kept->count].size = size;
        kept->total += size;
        at = end + 1;
    }
    return 1;
}

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
    struct kept kept;
    return read_parts(folder, pid, &kept);
}

/* The driver ------------------------------------------------------------------------------------- */

bool cuda_storage_contexts(const struct cuda_driver *driver)
{
    static bool retained;
    int count = 0;
    if (retained)
        return true;
    bool all = driver->device_get_count(&count) == CUDA_SUCCESS && count > 0;
    for (int i = 0; i < count; i++) {
        void *context = NULL;
        int device;
        if (driver->device_get(&device, i) == CUDA_SUCCESS &&
            driver->retain_context(&context, device) == CUDA_SUCCESS)
            driver->set_context(context); /* any: memory cannot be pinned without */
        else
            all = false;
    }
    retained = all;
    return all;
}

static bool lost(struct cuda_work *work, const struct cuda_task *task, enum kc_reason reason,
                 int error, const char *what, struct kc_result *result)
{
    char words[256];
    cuda_error_words(work->driver, error, words, sizeof(words));
    return kc_fail(result, reason, "%s (process %d): %s.", what, task->pid, words);
}

/* Each block may take as long as all of the memory may where the driver copies it itself. */
static void tell(struct cuda_work *work, enum cuda_op op, const struct cuda_task *task)
{
    if (work->step != NULL)
        work->step(work->data, op, task->pid, work->copy_timeout);
}

static bool is_alive(const struct cuda_work *work, const struct cuda_task *task)
{
    return work->alive == NULL || work->alive(task);
}

/* Makes the part's GPU the one that calls are about, and says which it is; all zeros: not known. */
static void enter(const struct cuda_driver *driver, const struct cuda_storage_part *part,
                  struct cuda_uuid *uuid)
{
    void *context = NULL;
    int device;
    *uuid = (struct cuda_uuid){.bytes = {0}};
    if (driver->stream_context(part->stream, &context) != CUDA_SUCCESS || context == NULL ||
        driver->set_context(context) != CUDA_SUCCESS ||
        driver->context_device(&device) != CUDA_SUCCESS ||
        driver->device_get_uuid(uuid, device) != CUDA_SUCCESS)
        *uuid = (struct cuda_uuid){.bytes = {0}};
}

/* Copies one block, again where that fails: what else could be done about it has a worse end. */
static int copy_block(const struct cuda_driver *driver, const struct cuda_storage_part *part,
                      size_t at, size_t size, unsigned char *block, bool to_host)
{
    int error = CUDA_SUCCESS;
    for (int i = 0; i < TRIES; i++) {
        if (i > 0)
            io_sleep_ms(retry_ms);
        error = to_host ? driver->to_host(block, part->address + at, size, part->stream)
                        : driver->to_device(part->address + at, block, size, part->stream);
        if (error == CUDA_SUCCESS)
            error = driver->wait_stream(part->stream);
        if (error == CUDA_SUCCESS)
            break;
    }
    return error;
}

static size_t block_at(const struct cuda_storage_part *part, size_t at)
{
    return part->size - at < BLOCK ? part->size - at : BLOCK;
}

/* Ends what the driver has begun: the process is in that state then. What a call says is not all: it may have
 * been done even so, or be done when it is asked for again. But once it is done the operation is gone, and is
 * named no more: it is asked for again only where it failed and the driver says that it is not done. */
static int complete(const struct cuda_work *work, const struct cuda_task *task,
                    const struct cuda_storage_info *info, int expected)
{
    void *operation = info->operation;
    bool asks = true;
    bool accepted = false;
    int error = CUDA_SUCCESS;
    for (int i = 0; i < TRIES; i++) {
        int state = CUDA_NONE;
        if (i > 0)
            io_sleep_ms(retry_ms);
        int now = asks ? work->driver->complete(operation) : CUDA_SUCCESS;
        accepted = accepted || (asks && now == CUDA_SUCCESS);
        int seen = work->driver->get_state(task->pid, &state);
        if (!is_alive(work, task) || (seen == CUDA_SUCCESS && state == expected))
            return CUDA_SUCCESS;
        asks = !accepted && seen == CUDA_SUCCESS;
        error = now != CUDA_SUCCESS ? now : error != CUDA_SUCCESS ? error : CUDA_ERROR_ILLEGAL_STATE;
    }
    return error;
}

/* The state of the process, with patience: much depends on it. CUDA_NONE: the driver does not tell. */
static int state_now(const struct cuda_work *work, const struct cuda_task *task)
{
    int state = CUDA_NONE;
    for (int i = 0; i < TRIES; i++) {
        if (i > 0)
            io_sleep_ms(retry_ms);
        if (work->driver->get_state(task->pid, &state) == CUDA_SUCCESS)
            return state;
    }
    return CUDA_NONE;
}

/* To the files ----------------------------------------------------------------------------------- */

struct sink {
    struct held *to;
    uint64_t at; /* bytes that have come */
    int error;   /* of the file; what comes then is kept in memory */
};

static bool write_at(int fd, const unsigned char *data, size_t size, uint64_t at)
{
    while (size > 0) {
        ssize_t n = pwrite(fd, data, size, (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            errno = n == 0 ? ENOSPC : errno;
            return false;
        }
        data += n;
        size -= (size_t)n;
        at += (uint64_t)n;
    }
    return true;
}

/* The file cannot take more than that, and without its memory the process could not run on. */
static bool rescue(struct held *to, uint64_t in_file)
{
    uint64_t need = to->kept.total - in_file;
    if (to->rest != NULL)
        munmap(to->rest, to->kept.total - to->in_file);
    to->rest = NULL;
    int64_t there = hostmem_available("", getpid());
    if (there >= 0 && need + spare > (uint64_t)there)
        return false;
    void *memory = mmap(NULL, need > 0 ? need : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return false;
    to->in_file = in_file;
    to->rest = memory;
    return true;
}

static bool put(struct sink *sink, const unsigned char *block, size_t size)
{
    if (sink->error == 0 && !write_at(sink->to->file, block, size, sink->at)) {
        sink->error = errno;
        if (!rescue(sink->to, sink->at))
            return false;
    }
    if (sink->error != 0)
        memcpy(sink->to->rest + (sink->at - sink->to->in_file), block, size);
    else /* begun early, so that what is not on the disk yet does not fill the memory */
        sync_file_range(sink->to->file, (off_t)sink->at, (off_t)size, SYNC_FILE_RANGE_WRITE);
    sink->at += size;
    return true;
}

static bool no_place(const struct cuda_task *task, struct kc_result *result)
{
    return kc_fail(result, KC_GPU_FAILED,
                   "The GPU memory of process %d has room neither in the folder for images nor in the "
                   "host's memory.",
                   task->pid);
}

/* One block is on its way from the device while the one before it is written. */
static bool copy_out(struct cuda_work *work, const struct cuda_task *task,
                     const struct cuda_storage_part *part, struct sink *sink,
                     struct kc_result *result)
{
    const struct cuda_driver *driver = work->driver;
    int now = 0;
    int begun = part->size == 0 ? CUDA_SUCCESS
                                : driver->to_host(blocks[0], part->address, block_at(part, 0),
                                                  part->stream);
    for (size_t at = 0; at < part->size; now = 1 - now) {
        size_t size = block_at(part, at);
        tell(work, CUDA_OP_CHECKPOINT, task);
        int error = begun == CUDA_SUCCESS ? driver->wait_stream(part->stream) : begun;
        if (error != CUDA_SUCCESS)
            error = copy_block(driver, part, at, size, blocks[now], true);
        if (error != CUDA_SUCCESS)
            return lost(work, task, KC_GPU_FAILED, error, "The GPU memory cannot be read", result);
        size_t next = at + size;
        if (next < part->size)
            begun = driver->to_host(blocks[1 - now], part->address + next, block_at(part, next),
                                    part->stream);
        if (!put(sink, blocks[now], size))
            return no_place(task, result);
        at = next;
    }
    return true;
}

static bool copy_parts(struct cuda_work *work, const struct cuda_task *task,
                       const struct cuda_storage_info *info, struct sink *sink,
                       struct kc_result *result)
{
    for (unsigned i = 0; i < info->count; i++) {
        struct cuda_uuid uuid;
        enter(work->driver, &info->parts[i], &uuid);
        if (!copy_out(work, task, &info->parts[i], sink, result))
            return false;
    }
    return true;
}

/* Errors of writing may show themselves only here. The GPU still has everything then. */
static bool make_sure(struct cuda_work *work, const struct cuda_task *task,
                      const struct cuda_storage_info *info, struct sink *sink,
                      struct kc_result *result)
{
    tell(work, CUDA_OP_CHECKPOINT, task);
    if (sink->to->in_file == 0 || fdatasync(sink->to->file) == 0)
        return true;
    sink->error = errno;
    sink->at = 0;
    return rescue(sink->to, 0) ? copy_parts(work, task, info, sink, result)
                               : no_place(task, result);
}

/* What is shown, part by part. */
static bool list_parts(const struct cuda_work *work, const struct cuda_task *task,
                       const struct cuda_storage_info *info, struct kept *kept,
                       struct kc_result *result)
{
    if (info->count > CUDA_GPUS_MAX)
        return kc_fail(result, KC_GPU_FAILED,
                       "Process %d has memory on more GPUs than is possible.", task->pid);
    for (unsigned i = 0; i < info->count; i++) {
        enter(work->driver, &info->parts[i], &kept->parts[i].uuid);
        kept->parts[i].size = info->parts[i].size;
        kept->total += info->parts[i].size;
        kept->count++;
    }
    return true;
}

/* The driver has shown the memory. From here on there is no way back but on: what is not copied when the driver
 * is told that all is done is lost. So a cancel waits, and what cannot be written is kept in memory. */
static enum cuda_stored store(struct cuda_work *work, struct cuda_task *task, struct held *to,
                              const struct cuda_storage_info *info, struct kc_result *result)
{
    struct sink sink = {.to = to};
    struct kept *kept = &to->kept;
    if (!list_parts(work, task, info, kept, result))
        return CUDA_STORE_FAILED;
    to->in_file = kept->total;
    pin_blocks(work->driver);
    /* What is not there now may not be there later; without it the blocks come one by one. */
    if (kept->total > 0)
        fallocate(to->file, FALLOC_FL_KEEP_SIZE, 0, (off_t)kept->total);
    errno = 0;
    if (!write_parts(work->folder, task->pid, kept)) {
        sink.error = errno != 0 ? errno : EIO;
        if (!rescue(to, 0)) {
            no_place(task, result);
            return CUDA_STORE_FAILED;
        }
    }
    if (!copy_parts(work, task, info, &sink, result) ||
        !make_sure(work, task, info, &sink, result))
        return CUDA_STORE_FAILED;
    task->stored = true;
    task->memory = (int64_t)kept->total;
    tell(work, CUDA_OP_CHECKPOINT, task);
    int error = complete(work, task, info, CUDA_CHECKPOINTED);
    if (error != CUDA_SUCCESS) {
        lost(work, task, KC_GPU_FAILED, error, "The driver does not end the checkpoint", result);
        return CUDA_STORE_FAILED;
    }
    task->shown = false;
    if (sink.error == 0)
        return CUDA_STORED;
    kc_fail_errno(result, KC_NO_SPACE, sink.error, "The GPU memory cannot be written");
    return CUDA_STORE_FAILED;
}

/* Asks the driver to show the memory, which it has done where it says so; else its state tells. */
static enum cuda_stored begin(struct cuda_work *work, struct cuda_task *task, struct held *to,
                              struct kc_result *result)
{
    struct cuda_storage_info *info = NULL;
    struct cuda_checkpoint_args args = {.custom_storage = &info};
    task->shown = true;
    int error = work->driver->checkpoint(task->pid, &args);
    bool done = error == CUDA_SUCCESS;
    int state = done && info != NULL ? CUDA_CHECKPOINTING : state_now(work, task);
    if (!is_alive(work, task))
        return CUDA_STORED;
    if (state == CUDA_CHECKPOINTING && info != NULL)
        return store(work, task, to, info, result);
    task->shown = state != CUDA_LOCKED && state != CUDA_CHECKPOINTED;
    if (state == CUDA_LOCKED)
        return CUDA_NOT_STORED;
    if (state == CUDA_CHECKPOINTED && done)
        return CUDA_IN_HOST;
    lost(work, task, KC_GPU_FAILED, done ? CUDA_ERROR_ILLEGAL_STATE : error,
         "The driver has begun a checkpoint that it does not show", result);
    return CUDA_STORE_FAILED;
}

enum cuda_stored cuda_storage_save(struct cuda_work *work, struct cuda_task *task,
                                   struct kc_result *result)
{
    let_go(task->pid);
    struct held *to = calloc(1, sizeof(*to));
    if (to == NULL)
        return CUDA_NOT_STORED;
    to->pid = task->pid;
    to->file = make_file(work->folder, task->pid, "", O_RDWR);
    to->next = held;
    held = to;
    bool ready = to->file >= 0 && make_blocks();
    if (ready && task->expected > 0 &&
        fallocate(to->file, FALLOC_FL_KEEP_SIZE, 0, (off_t)task->expected) != 0)
        ready = errno != ENOSPC && errno != EDQUOT && errno != EFBIG;
    enum cuda_stored stored = ready ? begin(work, task, to, result) : CUDA_NOT_STORED;
    if (stored == CUDA_NOT_STORED || stored == CUDA_IN_HOST) {
        remove_file(work->folder, task->pid, "");
        remove_file(work->folder, task->pid, ".parts");
        let_go(task->pid);
    }
    return stored;
}

/* From the files --------------------------------------------------------------------------------- */

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
    bool good = part->size == 0 || read_block(source, blocks[0], block_at(part, 0), offset);
    for (size_t at = 0; good && at < part->size; now = 1 - now) {
        size_t size = block_at(part, at);
        size_t next = at + size;
        tell(work, CUDA_OP_RESTORE, task);
        int error = driver->to_device(part->address + at, blocks[now], size, part->stream);
        if (next < part->size)
            good = read_block(source, blocks[1 - now], block_at(part, next), offset + next);
        if (error == CUDA_SUCCESS)
            error = driver->wait_stream(part->stream);
        if (error != CUDA_SUCCESS)
            error = copy_block(driver, part, at, size, blocks[now], false);
        if (error != CUDA_SUCCESS)
            return lost(work, task, KC_GPU_FAILED, error, "The GPU memory cannot be written back",
                        result);
        at = next;
    }
    return good || kc_fail(result, KC_GPU_FAILED,
                           "The GPU memory of process %d cannot be read back from its file.",
                           task->pid);
}

static void new_uuid(const struct cuda_work *work, struct cuda_uuid *uuid)
{
    for (size_t i = 0; i < work->pair_count; i++)
        if (memcmp(&work->pairs[i].from, uuid, sizeof(*uuid)) == 0) {
            *uuid = work->pairs[i].to;
            return;
        }
}

/* Which part of what was kept belongs there: that of the GPU which this one stands for. Where there are no
 * pairs the driver goes by the order of the GPUs; `kept->count`, none, where that is another one now. */
static size_t part_for(const struct cuda_work *work, const struct kept *kept, size_t at,
                       const struct cuda_uuid *here)
{
    for (size_t i = 0; i < kept->count; i++) {
        struct cuda_uuid there = kept->parts[i].uuid;
        new_uuid(work, &there);
        if (memcmp(&there, here, sizeof(there)) == 0)
            return work->pair_count > 0 || i == at ? i : kept->count;
    }
    return work->pair_count == 0 ? at : kept->count;
}

static bool fill(struct cuda_work *work, const struct cuda_task *task,
                 const struct cuda_storage_info *info, const struct kept *kept,
                 const struct source *source, struct kc_result *result)
{
    bool used[CUDA_GPUS_MAX] = {false};
    for (unsigned i = 0; i < info->count; i++) {
        struct cuda_uuid here;
        uint64_t offset = 0;
        enter(work->driver, &info->parts[i], &here);
        size_t found = part_for(work, kept, i, &here);
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
    static struct kept kept;
    const struct held *own = *find_held(task->pid);
    struct source source = {.file = -1};
    struct stat status;
    bool good = true;
    if (own != NULL) {
        kept = own->kept;
        source = (struct source){.file = own->file, .rest = own->rest, .in_file = own->in_file};
    } else {
        source.file = open_file(work->folder, task->pid, "", O_RDONLY);
        good = source.file >= 0 && fstat(source.file, &status) == 0 && S_ISREG(status.st_mode) &&
               read_parts(work->folder, task->pid, &kept) == 1 &&
               (uint64_t)status.st_size == kept.total;
        source.in_file = kept.total;
    }
    if (!good)
        kc_fail(result, KC_GPU_FAILED, "The GPU memory of process %d is not all there.", task->pid);
    else if (!make_blocks())
        good = kc_fail(result, KC_NO_MEMORY, "There is no memory to copy the GPU's through.");
    if (good)
        pin_blocks(work->driver);
    good = good && fill(work, task, info, &kept, &source, result);
    if (own == NULL)
        io_close(&source.file);
    if (!good)
        return !is_alive(work, task);
    tell(work, CUDA_OP_RESTORE, task);
    int error = complete(work, task, info, CUDA_LOCKED);
    task->shown = error != CUDA_SUCCESS;
    if (error == CUDA_SUCCESS)
        let_go(task->pid);
    return error == CUDA_SUCCESS ||
           lost(work, task, KC_GPU_FAILED, error, "The driver does not end the restore", result);
}
