/* SPDX-License-Identifier: BSD-3-Clause */
#include "tree.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "io.h"
#include "procfs.h"

static bool add(struct tree *tree, const struct proc_stat *stat)
{
    if (tree->count >= TREE_MAX)
        return false;
    if (tree->count == tree->capacity) {
        size_t bigger = tree->capacity == 0 ? 64 : tree->capacity * 2;
        struct tree_task *moved = realloc(tree->tasks, bigger * sizeof(*moved));
        if (moved == NULL)
            return false;
        tree->tasks = moved;
        tree->capacity = bigger;
    }
    tree->tasks[tree->count++] =
        (struct tree_task){.pid = stat->pid, .starttime = stat->starttime, .state = stat->state};
    return true;
}

/* For kernels without /proc/PID/task/TID/children: every process whose parent is in the tree. */
static bool collect_by_parent(struct tree *tree, pid_t root_pid)
{
    for (bool grew = true; grew;) {
        grew = false;
        DIR *dir = io_open_dir(proc_fd(), ".");
        if (dir == NULL)
            return false;
        for (const struct dirent *entry; (entry = readdir(dir)) != NULL;) {
            struct proc_stat stat;
            if (isdigit((unsigned char)entry->d_name[0]) == 0)
                continue;
            pid_t pid = (pid_t)strtol(entry->d_name, NULL, 10);
            if (!proc_stat(pid, &stat) || tree_find(tree, pid) != NULL)
                continue;
            if (stat.ppid != root_pid && tree_find(tree, stat.ppid) == NULL)
                continue;
            if (!add(tree, &stat)) {
                closedir(dir);
                return false;
            }
            grew = true;
        }
        closedir(dir);
    }
    return true;
}

bool tree_collect(struct tree *tree, pid_t root_pid, bool with_root)
{
    static pid_t children[TREE_MAX];
    struct proc_stat stat;
    tree->count = 0;
    if (with_root && (!proc_stat(root_pid, &stat) || !add(tree, &stat)))
        return false;
    pid_t parent = root_pid;
    size_t next = with_root ? 1 : 0;
    for (;;) {
        char name[16];
        snprintf(name, sizeof(name), "%d", parent);
        ssize_t n = proc_children_at(proc_fd(), name, children, TREE_MAX);
        if (n < 0 && proc_exists(parent))
            return collect_by_parent(tree, root_pid);
        for (ssize_t i = 0; i < n; i++)
            if (tree_find(tree, children[i]) == NULL && proc_stat(children[i], &stat) &&
                !add(tree, &stat))
                return false;
        if (next >= tree->count)
            return true;
        parent = tree->tasks[next++].pid;
    }
}

void tree_remove(struct tree *tree, pid_t pid)
{
    size_t kept = 0;
    for (size_t i = 0; i < tree->count; i++)
        if (tree->tasks[i].pid != pid)
            tree->tasks[kept++] = tree->tasks[i];
    tree->count = kept;
}

void tree_free(struct tree *tree)
{
    free(tree->tasks);
    *tree = (struct tree){0};
}

const struct tree_task *tree_find(const struct tree *tree, pid_t pid)
{
    for (size_t i = 0; i < tree->count; i++)
        if (tree->tasks[i].pid == pid)
            return &tree->tasks[i];
    return NULL;
}

bool tree_signal_task(const struct tree_task *task, int signal)
{
    int pidfd = sys_pidfd_open(task->pid);
    if (pidfd < 0)
        return false;
    /* The pidfd pins whatever has the number now: then see that it is still the one meant. */
    struct proc_stat stat;
    bool sent = proc_stat(task->pid, &stat) && stat.starttime == task->starttime &&
                sys_pidfd_signal(pidfd, signal) == 0;
    io_close(&pidfd);
    return sent;
}

bool tree_was_stopped(const struct tree *tree, const struct tree_task *task)
{
    const struct tree_task *was = tree == NULL ? NULL : tree_find(tree, task->pid);
    return was != NULL && was->state == 'T' && was->starttime == task->starttime;
}

void tree_thaw(const struct tree *tree, const struct tree *before)
{
    /* Children first: a parent that waits for one must not see it stopped. */
    for (size_t i = tree->count; i-- > 0;)
        if (!tree_was_stopped(before, &tree->tasks[i]))
            tree_signal_task(&tree->tasks[i], SIGCONT);
}

static bool threads_stopped(pid_t pid)
{
    DIR *dir = proc_dir(pid, "task");
    if (dir == NULL)
        return true; /* it has ended */
    bool stopped = true;
    for (const struct dirent *entry; stopped && (entry = readdir(dir)) != NULL;) {
        struct proc_stat stat;
        if (isdigit((unsigned char)entry->d_name[0]) != 0 &&
            proc_stat((pid_t)strtol(entry->d_name, NULL, 10), &stat))
            stopped = strchr("TtZX", stat.state) != NULL;
    }
    closedir(dir);
    return stopped;
}

bool tree_wait_stopped(const struct tree *tree, double deadline)
{
    for (size_t i = 0; i < tree->count; i++)
        while (!threads_stopped(tree->tasks[i].pid)) {
            if (io_now() >= deadline)
                return false;
            io_sleep_ms(1);
        }
    return true;
}

uint64_t tree_memory(const struct tree *tree)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < tree->count; i++) {
        struct proc_status status;
        if (proc_status(tree->tasks[i].pid, &status))
            sum += status.rss_anon + status.rss_shmem;
    }
    return sum;
}

bool tree_end_descendants(double deadline, void (*on_reap)(pid_t pid, int status, void *data),
                          void *data)
{
    struct tree tree = {0};
    for (int pause_ms = 1;; pause_ms = pause_ms < 50 ? pause_ms * 2 : 50) {
        tree_collect(&tree, getpid(), false);
        for (size_t i = 0; i < tree.count; i++)
            if (tree.tasks[i].state != 'Z')
                tree_signal_task(&tree.tasks[i], SIGKILL);
        for (;;) {
            int status;
            pid_t pid = waitpid(-1, &status, WNOHANG | __WALL);
            if (pid > 0) {
                if ((WIFEXITED(status) || WIFSIGNALED(status)) && on_reap != NULL)
                    on_reap(pid, status, data);
                continue;
            }
            if (pid < 0 && errno == EINTR)
                continue;
            if (pid < 0 && errno == ECHILD) {
                tree_free(&tree);
                return true;
            }
            break;
        }
        if (io_now() >= deadline) {
            tree_free(&tree);
            return false;
        }
        io_sleep_ms(pause_ms);
    }
}
