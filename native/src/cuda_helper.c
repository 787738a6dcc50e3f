/* SPDX-License-Identifier: BSD-3-Clause */
#include "cuda_helper.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "caps.h"
#include "io.h"
#include "procfs.h"
#include "tree.h"

enum { SOCKET = 3, ENVIRONMENT_MAX = 4 << 20 };

static const double stopped_limit = 60.0; /* seconds for a frozen tree to be thawed by the guard */

/* What the helper's callbacks need. */
struct helper {
    struct cuda_shared *shared;
    struct cuda_driver driver;
    bool unwanted;
};

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

bool cuda_holds_device(pid_t pid)
{
    static const char device[] = "/dev/nvidia";
    char path[32];
    char target[sizeof(device)];
    bool found = false;
    snprintf(path, sizeof(path), "%d/fd", pid);
    int fd = openat(proc_fd(), path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (dir == NULL) {
        io_close(&fd);
        return false;
    }
    for (const struct dirent *entry; !found && (entry = readdir(dir)) != NULL;)
        found = readlinkat(dirfd(dir), entry->d_name, target, sizeof(target)) >=
                    (ssize_t)sizeof(device) - 1 &&
                memcmp(target, device, sizeof(device) - 1) == 0;
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
    task->holds_device = cuda_holds_device(pid);
    read_visible(pid, task->visible, sizeof(task->visible));
    return true;
}

/* The callbacks of cuda_tree.c ------------------------------------------------------------------ */

static bool tell(void *data, enum cuda_op op, pid_t pid, double limit)
{
    struct helper *helper = data;
    struct cuda_message message = {.op = op, .pid = pid, .limit = limit};
    char letter = 0;
    send(SOCKET, &message, sizeof(message), MSG_DONTWAIT | MSG_NOSIGNAL);
    ssize_t n = recv(SOCKET, &letter, 1, MSG_DONTWAIT | MSG_PEEK);
    if (n == 1)
        n = recv(SOCKET, &letter, 1, MSG_DONTWAIT);
    if (n == 0 || (n == 1 && letter == CUDA_CANCEL))
        helper->unwanted = true;
    return !helper->unwanted;
}

static bool is_alive(const struct cuda_task *task)
{
    struct proc_stat stat;
    return proc_stat(task->pid, &stat) && stat.starttime == task->starttime && stat.state != 'Z' &&
           stat.state != 'X';
}

static int64_t host_memory(pid_t pid)
{
    struct proc_status status;
    return proc_status(pid, &status) ? (int64_t)(status.rss_anon + status.rss_shmem) : -1;
}

static size_t find_more(void *data)
{
    struct cuda_shared *shared = ((struct helper *)data)->shared;
    struct tree tree = {0};
    size_t before = shared->count;
    tree_collect(&tree, shared->root, true);
    for (size_t i = 0; i < tree.count && shared->count < CUDA_TASKS_MAX; i++) {
        bool known = false;
        for (size_t k = 0; k < shared->count; k++)
            known = known || (shared->tasks[k].pid == tree.tasks[i].pid &&
                              shared->tasks[k].starttime == tree.tasks[i].starttime);
        if (!known && cuda_maps_driver(tree.tasks[i].pid) &&
            cuda_describe(tree.tasks[i].pid, &shared->tasks[shared->count]))
            shared->count++;
    }
    tree_free(&tree);
    return shared->count - before;
}

/* What is asked of the helper ------------------------------------------------------------------- */

static struct cuda_work work_of(struct helper *helper)
{
    struct cuda_shared *shared = helper->shared;
    return (struct cuda_work){.driver = &helper->driver,
                              .tasks = shared->tasks,
                              .count = &shared->count,
                              .pairs = shared->pairs,
                              .pair_count = shared->pair_count,
                              .lock_timeout = shared->lock_timeout,
                              .copy_timeout = shared->copy_timeout,
                              .retry_for = shared->retry_for,
                              .step = tell,
                              .alive = is_alive,
                              .host_memory = host_memory,
                              .more = find_more,
                              .data = helper};
}

static bool load(struct helper *helper, enum cuda_load (*with)(struct cuda_driver *))
{
    struct cuda_shared *shared = helper->shared;
    shared->loaded = with(&helper->driver);
    shared->version = helper->driver.version;
    shared->custom_storage = helper->driver.custom_storage;
    if (shared->loaded == CUDA_NO_LIBRARY)
        return kc_fail(&shared->result, KC_GPU_UNSUPPORTED,
                       "The NVIDIA driver's library (libcuda.so.1) cannot be loaded.");
    if (shared->loaded == CUDA_TOO_OLD)
        return kc_fail(&shared->result, KC_GPU_UNSUPPORTED,
                       "The NVIDIA driver here (CUDA %d.%d) is too old: CUDA 12.8, which driver 570 has, "
                       "is needed.",
                       shared->version / 1000, shared->version % 1000 / 10);
    return true;
}

static void thaw(struct helper *helper)
{
    struct cuda_work work = work_of(helper);
    double started = io_now();
    cuda_tree_return(&work, &helper->shared->result);
    helper->shared->return_s = io_now() - started;
}

static void go(struct helper *helper)
{
    struct cuda_shared *shared = helper->shared;
    struct cuda_work work = work_of(helper);
    if (shared->mode == CUDA_DUMP) {
        find_more(helper);
        if (!cuda_tree_look(&work, false, &shared->result) || !cuda_tree_any(&work))
            return;
        shared->gpu_count = cuda_tree_gpus(&helper->driver, shared->gpus);
        cuda_tree_freeze(&work, &shared->lock_s, &shared->copy_s, &shared->result);
    } else if (shared->mode == CUDA_RESTORE) {
        if (shared->pair_count > 0 && shared->version < CUDA_PAIRS_SINCE)
            kc_fail(&shared->result, KC_GPU_UNSUPPORTED,
                    "The NVIDIA driver here (CUDA %d.%d) cannot restore onto another GPU: CUDA 13.0, "
                    "which driver 580 has, is needed.",
                    shared->version / 1000, shared->version % 1000 / 10);
        else if (cuda_tree_look(&work, true, &shared->result))
            thaw(helper);
    } else if (shared->mode == CUDA_REPAIR) {
        work.driver->init(0);
        thaw(helper);
    }
}

/* This program was killed: the guard thaws the tree, and then its GPU is given back. */
static void go_alone(struct helper *helper)
{
    double deadline = io_now() + stopped_limit;
    for (size_t i = 0; i < helper->shared->count; i++) {
        struct proc_stat stat;
        while (proc_stat(helper->shared->tasks[i].pid, &stat) && io_now() < deadline &&
               (stat.state == 'T' || stat.state == 't'))
            io_sleep_ms(50);
    }
    thaw(helper);
}

static void make_ordinary(int socket)
{
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    setsid();
    for (int number = 1; number < NSIG; number++)
        if (number != SIGKILL && number != SIGSTOP && number != SIGCHLD)
            signal(number, SIG_IGN);
    dup2(null, STDIN_FILENO);
    dup2(null, STDOUT_FILENO); /* that is for events */
    if (socket != SOCKET)
        dup2(socket, SOCKET);
    sys_close_from(SOCKET + 1);
    clearenv();
    setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin", 1);
    setenv("LC_ALL", "C", 1);
    if (!caps_drop_to_callers() || chdir("/") != 0)
        _exit(126);
    prctl(PR_SET_NAME, "kernel-capt-gpu");
    /* Without capabilities of its own it need not be hidden, and the driver looks into its own /proc. */
    prctl(PR_SET_DUMPABLE, 1);
    proc_open();
}

__attribute__((noreturn)) static void serve(struct cuda_shared *shared, int socket,
                                            enum cuda_load (*with)(struct cuda_driver *))
{
    struct helper helper = {.shared = shared};
    make_ordinary(socket);
    bool loaded = load(&helper, with);
    for (;;) {
        char letter = 0;
        ssize_t n;
        do
            n = recv(SOCKET, &letter, 1, 0);
        while (n < 0 && errno == EINTR);
        if (n != 1 && loaded && shared->mode == CUDA_DUMP)
            go_alone(&helper);
        if (n != 1 || letter == CUDA_QUIT)
            _exit(0);
        if (letter == CUDA_CANCEL)
            continue; /* it came too late */
        helper.unwanted = false;
        if (loaded && letter == CUDA_THAW)
            thaw(&helper);
        else if (loaded)
            go(&helper);
        struct cuda_message message = {.done = true};
        send(SOCKET, &message, sizeof(message), MSG_NOSIGNAL);
    }
}

pid_t cuda_helper_start(struct cuda_shared *shared, enum cuda_load (*with)(struct cuda_driver *),
                        int *in)
{
    int ends[2];
    *in = -1;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
        return -1;
    pid_t pid = fork();
    if (pid == 0)
        serve(shared, ends[1], with);
    int error = errno;
    io_close(&ends[1]);
    if (pid < 0)
        io_close(&ends[0]);
    *in = ends[0];
    errno = error;
    return pid;
}
