/* SPDX-License-Identifier: BSD-3-Clause */
#include "cuda_find.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "io.h"
#include "procfs.h"
#include "tree.h"

enum { ENVIRONMENT_MAX = 4 << 20 };

bool cuda_maps_driver(pid_t pid)
{
    static const char name[] = "/libcuda.so";
    char path[32];
    char text[16384 + sizeof(name)];
    size_t kept = 0;
    bool found = false;
    snprintf(path, sizeof(path), "%d/maps", pid);
    int fd = openat(proc_fd(), path, O_RDONLY | O_CLOEXEC);
    for (ssize_t n; fd >= 0 && !found && (n = read(fd, text + kept, 16384)) > 0;) {
        size_t length = kept + (size_t)n;
        found = memmem(text, length, name, sizeof(name) - 1) != NULL;
        kept = length < sizeof(name) - 2 ? length : sizeof(name) - 2;
        memmove(text, text + length - kept, kept);
    }
    io_close(&fd);
    return found;
}

static bool holds_device(pid_t pid)
{
    static const char device[] = "/dev/nvidia";
    char target[sizeof(device)];
    bool found = false;
    DIR *dir = proc_dir(pid, "fd");
    if (dir == NULL)
        return false;
    for (const struct dirent *entry; !found && (entry = readdir(dir)) != NULL;)
        found = readlinkat(dirfd(dir), entry->d_name, target, sizeof(target)) >=
                    (ssize_t)sizeof(device) - 1 &&
                memcmp(target, device, sizeof(device) - 1) == 0;
    closedir(dir);
    return found;
}

/* A thread of the driver's, which no child of fork() has: it is where its CUDA state is. */
static bool has_driver_thread(pid_t pid)
{
    static const char name[] = "cuda-EvtHandlr\n";
    bool found = false;
    DIR *dir = proc_dir(pid, "task");
    if (dir == NULL)
        return false;
    for (const struct dirent *entry; !found && (entry = readdir(dir)) != NULL;) {
        char comm[64];
        char file[300];
        snprintf(file, sizeof(file), "%s/comm", entry->d_name);
        found = isdigit((unsigned char)entry->d_name[0]) != 0 &&
                io_read_file_at(dirfd(dir), file, comm, sizeof(comm)) > 0 &&
                strcmp(comm, name) == 0;
    }
    closedir(dir);
    return found;
}

static void read_visible(pid_t pid, char *visible, size_t capacity)
{
    static const char name[] = "CUDA_VISIBLE_DEVICES=";
    char path[32];
    size_t length = 0;
    visible[0] = '\0';
    snprintf(path, sizeof(path), "%d/environ", pid);
    int fd = openat(proc_fd(), path, O_RDONLY | O_CLOEXEC);
    char *text = fd < 0 ? NULL : io_read_to_end(fd, ENVIRONMENT_MAX, &length);
    io_close(&fd);
    if (text == NULL)
        return;
    for (size_t at = 0; at < length; at += strlen(text + at) + 1)
        if (strncmp(text + at, name, sizeof(name) - 1) == 0)
            snprintf(visible, capacity, "%s", text + at + sizeof(name) - 1);
    free(text);
}

bool cuda_describe(pid_t pid, struct cuda_task *task)
{
    struct proc_stat stat;
    *task = (struct cuda_task){.pid = pid, .found = CUDA_NONE, .memory = -1};
    if (!proc_stat(pid, &stat) || stat.state == 'Z' || stat.state == 'X')
        return false;
    task->starttime = stat.starttime;
    task->holds_device = holds_device(pid);
    task->has_thread = has_driver_thread(pid);
    read_visible(pid, task->visible, sizeof(task->visible));
    return true;
}

size_t cuda_find(pid_t root, struct cuda_task tasks[CUDA_TASKS_MAX], size_t *count)
{
    struct tree tree = {0};
    size_t before = *count;
    tree_collect(&tree, root, true);
    for (size_t i = 0; i < tree.count && *count < CUDA_TASKS_MAX; i++) {
        bool known = false;
        for (size_t k = 0; k < *count; k++)
            known = known || (tasks[k].pid == tree.tasks[i].pid &&
                              tasks[k].starttime == tree.tasks[i].starttime);
        if (!known && cuda_maps_driver(tree.tasks[i].pid) &&
            cuda_describe(tree.tasks[i].pid, &tasks[*count]))
            ++*count;
    }
    tree_free(&tree);
    return *count - before;
}
