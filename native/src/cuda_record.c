/* SPDX-License-Identifier: BSD-3-Clause */
/* What is written down about GPUs: the value `gpu` of events, and a file beside the images. */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cuda.h"
#include "io.h"
#include "procfs.h"

static const char tasks_name[] = "gpu-tasks";

/* Bytes of an event: everything but text of others, which may become six times as long, is below these. */
enum { EVENT_TASK = 144 + CUDA_VISIBLE_MAX, EVENT_GPU = 192 + 6 * 96, EVENT_REST = 64 * 1024 };
enum { RANGE = 2 * 16 + 2, EVENT_RANGE = RANGE + 2 };
_Static_assert(CUDA_TASKS_MAX * EVENT_TASK + CUDA_RANGES_MAX * EVENT_RANGE +
                       CUDA_GPUS_MAX * EVENT_GPU + EVENT_REST < JSON_CAPACITY,
               "what may be said of GPUs fits into one event");

static void number(struct json *json, const char *key, int64_t value)
{
    if (value >= 0)
        json_int(json, key, value);
    else
        json_null(json, key);
}

/* What would take more than a byte each names no GPU, as what stands there instead does not. */
static void put_visible(struct json *json, const struct cuda_task *task)
{
    char text[sizeof(task->visible)];
    size_t length = strnlen(task->visible, sizeof(text));
    for (size_t i = 0; i < length; i++) {
        char c = task->visible[i];
        bool plain = c >= ' ' && c <= '~' && c != '"' && c != '\\';
        text[i] = plain ? c : isspace((unsigned char)c) != 0 ? ' ' : '?';
    }
    if (length == 0)
        json_null(json, "visible");
    else
        json_string_n(json, "visible", text, length);
}

/* Where its device memory came to. `left`: so many ranges may still be said, whatever stands there. */
static void put_ranges(struct json *json, const struct cuda_shared *shared, const struct cuda_task *task,
                       int *left)
{
    int at = task->range_at;
    int count = task->stored ? 0 : task->range_count;
    if (count < 0 || count > *left || (count > 0 && (at < 0 || at > CUDA_RANGES_MAX - count))) {
        json_null(json, "mappings");
        return;
    }
    json_open(json, "mappings", '[');
    for (int i = at; i < at + count; i++) {
        char text[RANGE];
        int length = snprintf(text, sizeof(text), "%" PRIx64 "-%" PRIx64, shared->ranges[i].start,
                              shared->ranges[i].end);
        json_string_n(json, NULL, text, (size_t)length);
    }
    json_close(json);
    *left -= count;
}

void cuda_record(const struct cuda *cuda, struct json *json)
{
    int ranges_left = CUDA_RANGES_MAX;
    char text[CUDA_UUID_TEXT];
    const struct cuda_shared *shared = cuda->shared;
    if (shared == NULL) {
        json_null(json, "gpu");
        return;
    }
    json_open(json, "gpu", '{');
    json_text(json, "driver", shared->driver_version, sizeof(shared->driver_version));
    json_int(json, "cuda_version", shared->version);
    json_real(json, "lock_s", shared->lock_s);
    json_real(json, "checkpoint_s", shared->copy_s);
    json_real(json, "restore_s", shared->return_s);
    json_real(json, "blocked_s", cuda->blocked_s);
    json_open(json, "processes", '[');
    for (size_t i = 0; i < shared->count && i < CUDA_TASKS_MAX; i++) {
        const struct cuda_task *task = &shared->tasks[i];
        if (task->found == CUDA_NONE)
            continue;
        json_open(json, NULL, '{');
        json_int(json, "pid", task->pid);
        json_bool(json, "parked", task->parked);
        number(json, "memory_bytes", task->memory);
        json_bool(json, "stored", task->stored);
        put_visible(json, task);
        put_ranges(json, shared, task, &ranges_left);
        json_close(json);
    }
    json_close(json);
    json_open(json, "gpus", '[');
    for (size_t i = 0; i < shared->gpu_count && i < CUDA_GPUS_MAX; i++) {
        const struct cuda_gpu *gpu = &shared->gpus[i];
        cuda_format_uuid(&gpu->uuid, text);
        json_open(json, NULL, '{');
        json_string(json, "uuid", text);
        json_string_n(json, "name", gpu->name, strnlen(gpu->name, sizeof(gpu->name)));
        json_int(json, "memory_bytes", (int64_t)gpu->memory);
        number(json, "released_bytes", gpu->released);
        json_close(json);
    }
    json_close(json);
    if (cuda->problem.reason != KC_OK) {
        json_open(json, "problem", '{');
        json_string(json, "reason", kc_reason_name(cuda->problem.reason));
        json_string(json, "message", cuda->problem.message);
        json_close(json);
    } else {
        json_null(json, "problem");
    }
    json_close(json);
}

bool cuda_write_tasks(const struct cuda *cuda, int images)
{
    if (cuda->shared == NULL)
        return true;
    int fd = openat(images, tasks_name,
                    O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
    bool done = fd >= 0;
    for (size_t i = 0; done && i < cuda->shared->count && i < CUDA_TASKS_MAX; i++) {
        char line[16];
        if (cuda->shared->tasks[i].found == CUDA_NONE)
            continue;
        int length = snprintf(line, sizeof(line), "%d\n", cuda->shared->tasks[i].pid);
        done = io_write_all(fd, line, (size_t)length);
    }
    io_close(&fd);
    return done;
}

ssize_t cuda_read_tasks(int images, pid_t pids[CUDA_TASKS_MAX])
{
    char text[CUDA_TASKS_MAX * 16];
    if (io_read_file_at(images, tasks_name, text, sizeof(text)) < 0)
        return errno == ENOENT ? 0 : -1; /* what cannot be read is not taken for a state without GPU */
    return proc_parse_pids(text, pids, CUDA_TASKS_MAX);
}
