/* SPDX-License-Identifier: BSD-3-Clause */
/* The restore as a transaction: a tree that does not come back whole is removed, the images stay. */
#include "restore.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "caps.h"
#include "criu.h"
#include "cuda.h"
#include "guard.h"
#include "hold.h"
#include "io.h"
#include "json.h"
#include "pidns.h"
#include "pidslot.h"
#include "procfs.h"
#include "rights.h"
#include "supervise.h"
#include "tree.h"

enum { PIDS_MAX = 65536, PIDS_BYTES = 1 << 20, PIDS_SHOWN = 32 };

static const char log_name[] = "restore.log";
static const char pid_name[] = "root.pid";
static const char socket_name[] = "streamer-serve.sock"; /* the name is CRIU's */

struct restore {
    const struct args *args;
    struct kc_result result;
    struct criu criu;
    struct supervisor supervisor;
    struct guard guard;
    int images;
    pid_t *pids;          /* every PID and TID of the images */
    size_t pid_count;
    pid_t taken[PIDS_SHOWN];
    size_t taken_count;
    pid_t gpu_tasks[CUDA_TASKS_MAX];
    ssize_t gpu_task_count;
    double gpu_took; /* seconds */
    double started, took;
};

static bool read_pids(struct restore *restore)
{
    if (restore->args->pids_file == NULL)
        return true;
    int fd = open(restore->args->pids_file, O_RDONLY | O_CLOEXEC | O_NOCTTY);
    size_t length = 0;
    char *text = fd < 0 ? NULL : io_read_to_end(fd, PIDS_BYTES, &length);
    io_close(&fd);
    if (text == NULL)
        return kc_fail_errno(&restore->result, KC_USAGE, errno, "The list of PIDs cannot be read");
    restore->pids = calloc(PIDS_MAX, sizeof(*restore->pids));
    ssize_t count = restore->pids ? proc_parse_pids(text, restore->pids, PIDS_MAX) : -1;
    free(text);
    if (count < 0)
        return kc_fail(&restore->result, KC_USAGE, "The list of PIDs is not valid.");
    restore->pid_count = (size_t)count;
    return true;
}

/* CRIU connects to whatever has this name, with rights that the caller may lack. */
static bool check_socket(struct restore *restore)
{
    struct stat info;
    if (!restore->args->stream)
        return true;
    if (fstatat(restore->images, socket_name, &info, AT_SYMLINK_NOFOLLOW) != 0)
        return kc_fail_errno(&restore->result, KC_USAGE, errno, "The images' socket is missing");
    if (!S_ISSOCK(info.st_mode) || info.st_uid != getuid())
        return kc_fail(&restore->result, KC_USAGE, "The images' socket is not the caller's.");
    return true;
}

static bool wanted(const struct restore *restore, pid_t pid)
{
    for (size_t i = 0; i < restore->pid_count; i++)
        if (restore->pids[i] == pid)
            return true;
    return false;
}

static void note_taken(struct restore *restore, pid_t pid)
{
    for (size_t i = 0; i < restore->taken_count; i++)
        if (restore->taken[i] == pid)
            return;
    if (restore->taken_count < PIDS_SHOWN)
        restore->taken[restore->taken_count++] = pid;
}

/* Where /proc hides the processes of others, a signal that is not sent still finds them. */
static bool is_taken(pid_t pid)
{
    return proc_exists(pid) || kill(pid, 0) == 0 || errno == EPERM;
}

/* A number is taken by a process, by a thread, and also by a group or session whose leader is gone. */
static void find_taken(struct restore *restore)
{
    restore->taken_count = 0;
    for (size_t i = 0; i < restore->pid_count; i++)
        if (is_taken(restore->pids[i]))
            note_taken(restore, restore->pids[i]);
    DIR *dir = io_open_dir(proc_fd(), ".");
    if (dir == NULL)
        return;
    for (const struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        struct proc_stat stat;
        if (isdigit((unsigned char)entry->d_name[0]) == 0 ||
            !proc_stat((pid_t)strtol(entry->d_name, NULL, 10), &stat))
            continue;
        if (wanted(restore, stat.pgrp))
            note_taken(restore, stat.pgrp);
        if (wanted(restore, stat.session))
            note_taken(restore, stat.session);
    }
    closedir(dir);
}

static void event_pids_taken(struct restore *restore)
{
    static struct json json;
    restore->result = (struct kc_result){0};
    kc_fail(&restore->result, KC_PID_IN_USE, "%s", kc_reason_words(KC_PID_IN_USE));
    kc_log("%s", restore->result.message);
    json_begin(&json, "error");
    json_string(&json, "reason", kc_reason_name(KC_PID_IN_USE));
    json_string(&json, "message", restore->result.message);
    json_open(&json, "pids", '[');
    for (size_t i = 0; i < restore->taken_count; i++) {
        char comm[64];
        json_open(&json, NULL, '{');
        json_int(&json, "pid", restore->taken[i]);
        json_string(&json, "comm", proc_comm(restore->taken[i], comm, sizeof(comm)) ? comm : NULL);
        json_close(&json);
    }
    json_close(&json);
    json_open(&json, "criu_errors", '[');
    json_close(&json);
    json_null(&json, "log");
    json_send(&json, 5000);
}

/* Waits for `fd`, at most `most` ms; false when the restore is not wanted any more. */
static bool wait_for(void *data, int fd, int most)
{
    struct restore *restore = data;
    struct supervisor *supervisor = &restore->supervisor;
    double deadline = restore->started + restore->args->timeout;
    struct pollfd fds[3] = {{.fd = fd, .events = POLLIN},
                            {.fd = supervisor->signals, .events = POLLIN},
                            {.fd = STDIN_FILENO, .events = POLLIN}};
    poll(fds, 3, io_until(deadline, most));
    if (fds[1].revents != 0) {
        struct signalfd_siginfo info;
        while (read(supervisor->signals, &info, sizeof(info)) == (ssize_t)sizeof(info))
            if (info.ssi_signo == SIGTERM || info.ssi_signo == SIGINT || info.ssi_signo == SIGHUP)
                kc_fail(&restore->result, KC_CANCELLED, "The restore was cancelled.");
    }
    if (fds[2].revents != 0) {
        enum io_command command;
        io_fill(&supervisor->lines, STDIN_FILENO);
        /* All of them: what is read already wakes nobody up again. */
        do {
            command = io_next(&supervisor->lines);
            if (command == IO_EOF || command == IO_KILL || command == IO_CANCEL)
                kc_fail(&restore->result, KC_CANCELLED, "The restore was cancelled.");
        } while (command != IO_NONE && command != IO_EOF);
    }
    if (io_now() >= deadline)
        kc_fail(&restore->result, KC_TIMEOUT, "The restore took too long and was undone.");
    return restore->result.reason == KC_OK;
}

/* Waits until CRIU has ended or is not wanted any more. */
static bool wait_for_criu(struct restore *restore, struct criu_process *process, int *status)
{
    do
        if (waitpid(process->pid, status, WNOHANG) == process->pid)
            return true;
    while (wait_for(restore, process->pidfd, 1000));
    return false;
}

static bool run_criu(struct restore *restore)
{
    struct criu_args args = {.count = 0};
    struct criu_process process;
    char words[128] = "";
    int status;
    criu_common_args(&args, "restore", log_name);
    criu_arg(&args, "--restore-detached");
    criu_arg(&args, "--restore-sibling");
    criu_arg(&args, "--pidfile");
    criu_arg(&args, pid_name);
    if (restore->args->stream)
        criu_arg(&args, "--stream");
    if (restore->gpu_task_count > 0)
        criu_no_plugins(&args);
    unlinkat(restore->images, pid_name, 0); /* CRIU would not write over it */
    restore->started = io_now();
    if (!criu_spawn(&restore->criu, &args, restore->images, &process, &restore->result))
        return false;
    bool ended = guard_start_restore(&restore->guard, process.pidfd, restore->pids,
                                     restore->pid_count, &restore->result) &&
                 criu_go(&process) && wait_for_criu(restore, &process, &status);
    criu_close(&process);
    if (!ended)
        return kc_fail(&restore->result, KC_INTERNAL, "CRIU could not be started.");
    if (!criu_succeeded(status, words, sizeof(words)))
        return kc_fail(&restore->result,
                       criu_out_of_space(restore->images, log_name) ? KC_NO_SPACE : KC_CRIU_FAILED,
                       "The kernel could not be restored. %s", words);
    return true;
}

/* CRIU has written the root's number. Other children there may be: a process whose session leader
 * was dead when it was saved comes back as a child of this process and not of the kernel. */
static bool find_root(struct restore *restore, const struct tree *tree)
{
    char text[32];
    pid_t pid = 0;
    struct proc_stat stat;
    bool found = io_read_file_at(restore->images, pid_name, text, sizeof(text)) > 0 &&
                 proc_parse_pids(text, &pid, 1) == 1 && tree_find(tree, pid) != NULL &&
                 proc_stat(pid, &stat) && stat.ppid == getpid();
    unlinkat(restore->images, pid_name, 0);
    if (!found)
        return kc_fail(&restore->result, KC_CRIU_FAILED, "The restored kernel ended at once.");
    restore->supervisor.root = pid;
    return true;
}

/* Before the main thread goes on: all others run, and with them those of the driver. */
static bool restore_gpu(struct restore *restore, const struct tree *tree)
{
    double started = io_now();
    for (ssize_t i = 0; i < restore->gpu_task_count; i++)
        if (tree_find(tree, restore->gpu_tasks[i]) == NULL)
            return kc_fail(&restore->result, KC_GPU_FAILED,
                           "Process %d, which uses the GPU, did not come back.",
                           restore->gpu_tasks[i]);
    bool good = cuda_restore(restore->gpu_tasks, (size_t)restore->gpu_task_count, restore->args,
                             restore->images, wait_for, restore, &restore->result);
    restore->gpu_took = io_now() - started;
    return good;
}

static bool read_gpu_tasks(struct restore *restore)
{
    restore->gpu_task_count = cuda_read_tasks(restore->images, restore->gpu_tasks);
    return restore->gpu_task_count >= 0 ||
           kc_fail(&restore->result, KC_USAGE,
                   "The list of GPU tasks (gpu-tasks) cannot be read, or is not valid.");
}

static bool bring_back(struct restore *restore)
{
    struct tree tree = {0};
    if (!run_criu(restore))
        return false;
    bool good = tree_collect(&tree, getpid(), false);
    tree_remove(&tree, restore->guard.pid);
    good = good && find_root(restore, &tree) &&
                rights_check(&tree, &restore->result) &&
                (!restore->args->hold ||
                 hold_begin(restore->supervisor.root, &restore->result));
    if (good) {
        criu_mark_stopped(restore->images, &tree);
        tree_thaw(&tree, &tree);
        good = restore_gpu(restore, &tree);
    }
    guard_dismiss(&restore->guard);
    restore->took = io_now() - restore->started;
    tree_free(&tree);
    if (good && restore->args->hold) {
        restore->supervisor.held = true;
        restore->supervisor.hold_deadline = io_now() + restore->args->hold_timeout;
    }
    return good || kc_fail(&restore->result, KC_CRIU_FAILED, "The restored kernel ended at once.");
}

static bool choose_namespace(struct restore *restore, int *exit_code)
{
    enum args_pidns choice = restore->args->pid_namespace;
    *exit_code = -1;
    pidslot_keep_clear(restore->pids, restore->pid_count);
    find_taken(restore);
    if (choice == PIDNS_ALWAYS)
        return pidns_enter(exit_code, &restore->result);
    if (restore->taken_count == 0)
        return true;
    if (choice == PIDNS_AUTO && pidns_possible())
        return pidns_enter(exit_code, &restore->result);
    return false;
}

static void announce(const struct restore *restore)
{
    static struct json json;
    pid_t root = restore->supervisor.root;
    json_begin(&json, "restored");
    json_int(&json, "pid", pidns_outer_pid(root));
    json_int(&json, "inner_pid", root);
    json_real(&json, "restore_s", restore->took);
    if (restore->gpu_task_count > 0)
        json_real(&json, "gpu_s", restore->gpu_took);
    else
        json_null(&json, "gpu_s");
    json_bool(&json, "pid_namespace", pidns_inside());
    json_bool(&json, "time_namespace",
              proc_namespace(root, "time") != 0 &&
                  proc_namespace(root, "time") != proc_namespace(0, "time"));
    json_send(&json, 5000);
    if (restore->supervisor.held) {
        json_begin(&json, "held");
        json_send(&json, 1000);
    }
}

static int fail(struct restore *restore)
{
    supervise_abandon(&restore->supervisor);
    guard_dismiss(&restore->guard);
    /* A number may have been taken after it was checked: then that is what went wrong. */
    if (restore->result.reason == KC_CRIU_FAILED && !pidns_inside())
        find_taken(restore);
    if (restore->taken_count > 0 &&
        (restore->result.reason == KC_OK || restore->result.reason == KC_CRIU_FAILED))
        event_pids_taken(restore);
    else
        criu_error_event(&restore->result, restore->images, log_name);
    return restore->result.reason == KC_USAGE ? 2 : 1;
}

int restore_command(const struct args *args)
{
    struct restore restore = {
        .args = args, .images = -1, .guard = {.pid = -1, .pipe = -1}};
    int exit_code = -1;
    restore.images = criu_open_images(args->images_dir, &restore.result);
    if (restore.images < 0 || !check_socket(&restore) || !read_pids(&restore) ||
        !read_gpu_tasks(&restore) ||
        !caps_can_capture(&restore.result) || !criu_find(&restore.criu, &restore.result) ||
        !choose_namespace(&restore, &exit_code))
        return fail(&restore);
    if (exit_code >= 0)
        return exit_code;
    if (pidns_inside()) {
        restore.taken_count = 0; /* that was outside */
        pidslot_keep_clear(restore.pids, restore.pid_count);
    }
    if (!supervise_init(&restore.supervisor, &restore.result) || !bring_back(&restore))
        return fail(&restore);
    free(restore.pids);
    announce(&restore);
    return supervise(&restore.supervisor);
}
