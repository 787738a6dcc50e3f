/* SPDX-License-Identifier: BSD-3-Clause */
#include "cuda_find.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "io.h"
#include "procfs.h"
#include "tree.h"

enum { ENVIRONMENT_MAX = 8 << 20 }; /* bytes; the kernel allows a program 6 MiB */
enum { FORK_LOOKS = 10, FORK_PAUSE_MS = 5 };

static bool has_ended(pid_t pid)
{
    int error = errno;
    struct proc_stat stat;
    bool ended = (error == ENOENT || error == ESRCH) ||
                 (proc_stat(pid, &stat) && (stat.state == 'Z' || stat.state == 'X'));
    errno = error;
    return ended;
}

static enum cuda_seen seen(pid_t pid, bool found, bool failed)
{
    if (found)
        return CUDA_SEEN_YES;
    return failed && !has_ended(pid) ? CUDA_SEEN_UNKNOWN : CUDA_SEEN_NO;
}

enum cuda_seen cuda_maps_driver(pid_t pid)
{
    static const char name[] = "/libcuda.so";
    char path[32];
    char text[16384 + sizeof(name)];
    size_t kept = 0;
    ssize_t n = -1;
    bool found = false;
    snprintf(path, sizeof(path), "%d/maps", pid);
    int fd = openat(proc_fd(), path, O_RDONLY | O_CLOEXEC);
    while (fd >= 0 && !found && (n = read(fd, text + kept, 16384)) > 0) {
        size_t length = kept + (size_t)n;
        found = memmem(text, length, name, sizeof(name) - 1) != NULL;
        kept = length < sizeof(name) - 2 ? length : sizeof(name) - 2;
        memmove(text, text + length - kept, kept);
    }
    io_close(&fd);
    return seen(pid, found, n < 0);
}

static enum cuda_seen holds_device(pid_t pid)
{
    static const char device[] = "/dev/nvidia";
    char target[sizeof(device)];
    bool found = false;
    DIR *dir = proc_dir(pid, "fd");
    if (dir == NULL)
        return seen(pid, false, true);
    for (const struct dirent *entry; !found && (entry = readdir(dir)) != NULL;)
        found = readlinkat(dirfd(dir), entry->d_name, target, sizeof(target)) >=
                    (ssize_t)sizeof(device) - 1 &&
                memcmp(target, device, sizeof(device) - 1) == 0;
    closedir(dir);
    return seen(pid, found, false);
}

/* A thread of the driver's, which no child of fork() has: it is where its CUDA state is. */
static enum cuda_seen has_driver_thread(pid_t pid)
{
    static const char name[] = "cuda-EvtHandlr\n";
    bool found = false;
    int error = 0;
    DIR *dir = proc_dir(pid, "task");
    if (dir == NULL)
        return seen(pid, false, true);
    for (const struct dirent *entry; !found && (entry = readdir(dir)) != NULL;) {
        char comm[64];
        char file[300];
        if (isdigit((unsigned char)entry->d_name[0]) == 0)
            continue;
        snprintf(file, sizeof(file), "%s/comm", entry->d_name);
        ssize_t n = io_read_file_at(dirfd(dir), file, comm, sizeof(comm));
        found = n > 0 && strcmp(comm, name) == 0;
        if (n < 0 && errno != ENOENT && errno != ESRCH) /* else it has ended */
            error = errno;
    }
    closedir(dir);
    errno = error;
    return seen(pid, found, error != 0);
}

/* The first one counts, as for the C library. False when it cannot be read. */
static bool read_visible(pid_t pid, struct cuda_task *task)
{
    static const char name[] = "CUDA_VISIBLE_DEVICES=";
    char path[32];
    size_t length = 0;
    snprintf(path, sizeof(path), "%d/environ", pid);
    int fd = openat(proc_fd(), path, O_RDONLY | O_CLOEXEC);
    char *text = fd < 0 ? NULL : io_read_to_end(fd, ENVIRONMENT_MAX, &length);
    io_close(&fd);
    if (text == NULL)
        return has_ended(pid);
    for (size_t at = 0; at < length; at += strlen(text + at) + 1)
        if (strncmp(text + at, name, sizeof(name) - 1) == 0) {
            const char *value = text + at + sizeof(name) - 1;
            task->visible_is_cut = strlen(value) >= sizeof(task->visible);
            snprintf(task->visible, sizeof(task->visible), "%s", value);
            break;
        }
    free(text);
    return true;
}

enum cuda_seen cuda_describe(pid_t pid, struct cuda_task *task)
{
    struct proc_stat stat;
    *task = (struct cuda_task){.pid = pid, .found = CUDA_NONE, .memory = -1, .range_count = -1};
    errno = 0;
    if (!proc_stat(pid, &stat))
        return seen(pid, false, true);
    if (stat.state == 'Z' || stat.state == 'X')
        return CUDA_SEEN_NO;
    task->starttime = stat.starttime;
    enum cuda_seen device = holds_device(pid);
    enum cuda_seen thread = device == CUDA_SEEN_UNKNOWN ? device : has_driver_thread(pid);
    if (thread == CUDA_SEEN_UNKNOWN || !read_visible(pid, task))
        return CUDA_SEEN_UNKNOWN;
    task->holds_device = device == CUDA_SEEN_YES;
    task->has_thread = thread == CUDA_SEEN_YES;
    return CUDA_SEEN_YES;
}

bool cuda_unknown(pid_t pid, struct kc_result *result)
{
    return kc_fail_errno(result, KC_GPU_FAILED, errno,
                         "It cannot be told whether process %d uses the GPU", pid);
}

static struct cuda_task *known(struct cuda_task *tasks, size_t count, const struct tree_task *task)
{
    for (size_t i = 0; i < count; i++)
        if (tasks[i].pid == task->pid && tasks[i].starttime == task->starttime)
            return &tasks[i];
    return NULL;
}

/* Adds the task if it has the library mapped. */
static bool look_at(const struct tree_task *one, struct cuda_task tasks[CUDA_TASKS_MAX],
                    size_t *count, struct kc_result *result)
{
    struct cuda_task *before = known(tasks, *count, one);
    struct cuda_task now = {.found = CUDA_NONE};
    if (before != NULL && before->found != CUDA_NONE)
        return true;
    enum cuda_seen mapped = before != NULL ? CUDA_SEEN_YES : cuda_maps_driver(one->pid);
    if (mapped == CUDA_SEEN_YES)
        mapped = cuda_describe(one->pid, &now);
    /* A child that is about to run another program has its parent's devices for a moment. */
    for (int i = 0; before == NULL && i < FORK_LOOKS && mapped == CUDA_SEEN_YES &&
                    now.holds_device && !now.has_thread;
         i++) {
        io_sleep_ms(FORK_PAUSE_MS);
        mapped = cuda_maps_driver(one->pid);
        if (mapped == CUDA_SEEN_YES)
            mapped = cuda_describe(one->pid, &now);
    }
    if (mapped == CUDA_SEEN_UNKNOWN)
        return cuda_unknown(one->pid, result);
    if (mapped == CUDA_SEEN_NO || now.starttime != one->starttime)
        return true;
    if (before == NULL && *count == CUDA_TASKS_MAX)
        return kc_fail(result, KC_GPU_UNSUPPORTED,
                       "More than %d processes of the kernel have the GPU driver's library loaded, and "
                       "no more can be saved or parked at once: end some of them.",
                       CUDA_TASKS_MAX);
    *(before != NULL ? before : &tasks[*count]) = now;
    *count += before == NULL;
    return true;
}

bool cuda_find(pid_t root, struct cuda_task tasks[CUDA_TASKS_MAX], size_t *count,
               struct kc_result *result)
{
    struct tree tree = {0};
    /* Without a root it has ended, and all are gone that could be found. */
    bool good = tree_collect(&tree, root, true) || (tree.count == 0 && has_ended(root)) ||
                kc_fail(result, KC_GPU_FAILED,
                        "The processes of the kernel cannot be listed.");
    for (size_t i = 0; good && i < tree.count; i++)
        good = look_at(&tree.tasks[i], tasks, count, result);
    tree_free(&tree);
    return good;
}
