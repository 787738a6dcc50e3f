/* SPDX-License-Identifier: BSD-3-Clause */
#include "cuda_helper.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "caps.h"
#include "cuda_checks.h"
#include "cuda_find.h"
#include "cuda_storage.h"
#include "io.h"
#include "procfs.h"

enum { SOCKET = 3, FOLDER = 4 };

static const double stopped_limit = 60.0; /* seconds for a frozen tree to be thawed by the guard */

/* What the helper's callbacks need. */
struct helper {
    struct cuda_shared *shared;
    struct cuda_driver driver;
    struct cuda_nvml nvml;
    bool unwanted;
    /* Of the process whose device memory is copied, as it was before. */
    int64_t memory_before; /* -1: not known */
    struct cuda_ranges ranges_before;
    bool ranges_known;
};

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

static bool find_more(void *data, struct kc_result *result)
{
    struct cuda_shared *shared = ((struct helper *)data)->shared;
    return cuda_find(shared->root, shared->tasks, &shared->count, result);
}

static int64_t host_memory(pid_t pid)
{
    struct proc_status status;
    return proc_status(pid, &status) ? (int64_t)(status.rss_anon + status.rss_shmem) : -1;
}

/* Where it came to: nothing is said of that where it cannot be told, or is more than there is room for. */
static void note_ranges(struct helper *helper, struct cuda_task *task)
{
    struct cuda_shared *shared = helper->shared;
    struct cuda_ranges after;
    if (!helper->ranges_known || !cuda_ranges_read(task->pid, &after))
        return;
    ssize_t found =
        cuda_ranges_new(&helper->ranges_before, &after, shared->ranges + shared->range_count,
                        CUDA_RANGES_MAX - shared->range_count);
    if (found >= 0) {
        task->range_at = (int)shared->range_count;
        task->range_count = (int)found;
        shared->range_count += (size_t)found;
    }
    cuda_ranges_free(&after);
}

static void note_task(void *data, struct cuda_task *task, bool after)
{
    struct helper *helper = data;
    if (!after) {
        cuda_ranges_free(&helper->ranges_before);
        helper->ranges_known = cuda_ranges_read(task->pid, &helper->ranges_before);
        helper->memory_before = host_memory(task->pid);
        return;
    }
    if (helper->memory_before >= 0) {
        int64_t now = host_memory(task->pid);
        task->memory = now > helper->memory_before ? now - helper->memory_before : 0;
    }
    note_ranges(helper, task);
}

static void note_memory(void *data, bool after)
{
    const struct helper *helper = data;
    cuda_note_memory(helper->shared, &helper->nvml, after);
}

static bool has_room(void *data)
{
    const struct helper *helper = data;
    return cuda_has_room(helper->shared, &helper->nvml);
}

static bool check_host(void *data)
{
    const struct helper *helper = data;
    return cuda_check_host(helper->shared, &helper->nvml);
}

/* What is asked of the helper ------------------------------------------------------------------- */

static struct cuda_work work_of(struct helper *helper)
{
    struct cuda_shared *shared = helper->shared;
    /* A restore is given up by this program, which ends the processes. */
    bool to_be_undone = shared->mode == CUDA_DUMP || shared->mode == CUDA_UNPARK;
    return (struct cuda_work){.driver = &helper->driver,
                              .tasks = shared->tasks,
                              .count = &shared->count,
                              .pairs = shared->pairs,
                              .pair_count = shared->pair_count,
                              .lock_timeout = shared->lock_timeout,
                              .copy_timeout = shared->copy_timeout,
                              .retry_for = shared->retry_for,
                              .deadline = to_be_undone ? shared->deadline : 0.0,
                              .folder = shared->folder > 0 ? FOLDER : 0,
                              .none_parked = shared->none_parked,
                              .host_room = check_host,
                              .step = tell,
                              .alive = is_alive,
                              .noting = note_task,
                              .more = find_more,
                              .copying = note_memory,
                              .room = has_room,
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

static void ask_nvml(struct helper *helper)
{
    struct cuda_shared *shared = helper->shared;
    if (helper->driver.bind_nvml != NULL)
        helper->driver.bind_nvml(&helper->nvml);
    cuda_nvml_driver_version(&helper->nvml, shared->driver_version, sizeof(shared->driver_version));
}

/* Whether device memory goes into the folder: where the driver does that, and it has room for all of it. Where it
 * does, what this process needs for it on the GPUs is there before their free memory is noted. */
static bool can_store(struct helper *helper)
{
    if (helper->shared->folder <= 0 || !helper->driver.custom_storage ||
        !cuda_folder_fits(helper->shared, &helper->nvml, FOLDER))
        return false;
    tell(helper, CUDA_OP_START, 0, CUDA_START_LIMIT);
    return cuda_storage_contexts(&helper->driver);
}

static void go(struct helper *helper)
{
    struct cuda_shared *shared = helper->shared;
    struct cuda_work work = work_of(helper);
    double started = io_now();
    switch (shared->mode) {
    case CUDA_PROBE:
        ask_nvml(helper);
        break;
    case CUDA_DUMP:
    case CUDA_UNPARK:
        if (!find_more(helper, &shared->result) || !cuda_check_map(shared) ||
            !cuda_tree_look(&work, false, &shared->result) || !cuda_tree_any(&work))
            break;
        tell(helper, CUDA_OP_START, 0, CUDA_START_LIMIT);
        shared->gpu_count = cuda_tree_gpus(&helper->driver, shared->gpus);
        ask_nvml(helper);
        if (shared->mode == CUDA_UNPARK)
            cuda_tree_unpark(&work, &shared->result);
        else if (cuda_check_tasks(shared, &helper->nvml) && ((work.store = can_store(helper)) || check_host(helper)))
            cuda_tree_freeze(&work, &shared->lock_s, &shared->copy_s, &shared->result);
        if (shared->mode == CUDA_UNPARK)
            shared->return_s = io_now() - started;
        break;
    case CUDA_RESTORE:
        for (size_t i = 0; shared->folder > 0 && i < shared->count; i++) {
            int has = cuda_storage_has(FOLDER, shared->tasks[i].pid);
            shared->tasks[i].stored = has > 0;
            if (has < 0)
                kc_fail(&shared->result, KC_GPU_FAILED,
                        "What is said of the GPU memory of process %d is not valid.",
                        shared->tasks[i].pid);
        }
        if (shared->result.reason == KC_OK && cuda_check_map(shared) && cuda_tree_look(&work, true, &shared->result))
            thaw(helper);
        break;
    case CUDA_REPAIR:
        tell(helper, CUDA_OP_START, 0, CUDA_START_LIMIT);
        work.driver->init(0); /* whether that was of use, the tasks' states will tell */
        thaw(helper);
        break;
    }
}

/* Without a driver that can do it: whether a process of the tree does more than having the library. */
static bool is_idle(struct helper *helper)
{
    const struct cuda_shared *shared = helper->shared;
    struct kc_result unknown = {.reason = KC_OK};
    if (!find_more(helper, &unknown)) {
        helper->shared->result = unknown; /* that is told, and not how old the driver is */
        return false;
    }
    for (size_t i = 0; i < shared->count; i++)
        if (shared->tasks[i].holds_device || shared->tasks[i].has_thread)
            return false;
    return true;
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

/* Where they are may be the place of another. The driver may start programs of its own, which get neither. */
static void take_files(int socket, int folder)
{
    int high = fcntl(socket, F_DUPFD_CLOEXEC, FOLDER + 1);
    int other = folder > 0 ? fcntl(folder, F_DUPFD_CLOEXEC, FOLDER + 1) : -1;
    if (dup3(high, SOCKET, O_CLOEXEC) != SOCKET ||
        (folder > 0 && dup3(other, FOLDER, O_CLOEXEC) != FOLDER))
        _exit(126);
    sys_close_from(folder > 0 ? FOLDER + 1 : SOCKET + 1);
}

static void make_ordinary(int socket, int folder)
{
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    setsid();
    for (int number = 1; number < NSIG; number++)
        if (number != SIGKILL && number != SIGSTOP && number != SIGCHLD)
            signal(number, SIG_IGN);
    dup2(null, STDIN_FILENO);
    dup2(null, STDOUT_FILENO); /* that is for events */
    take_files(socket, folder);
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
    make_ordinary(socket, shared->folder);
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
        else if (shared->mode == CUDA_PROBE && shared->loaded == CUDA_TOO_OLD)
            ask_nvml(&helper);
        else if ((shared->mode == CUDA_DUMP || shared->mode == CUDA_UNPARK) && is_idle(&helper))
            shared->result = (struct kc_result){.reason = KC_OK};
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
