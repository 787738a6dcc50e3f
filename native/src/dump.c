/* SPDX-License-Identifier: BSD-3-Clause */
/* The dump as a transaction: whatever happens, the tree runs on (unless the caller wants otherwise
 * and the images are whole). */
#include "dump.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "caps.h"
#include "criu.h"
#include "cuda.h"
#include "guard.h"
#include "images.h"
#include "io.h"
#include "json.h"
#include "pidns.h"
#include "procfs.h"
#include "repair.h"
#include "rights.h"
#include "tree.h"
#include "window.h"

static const char log_name[] = "dump.log";
static const double cancel_grace = 30.0;    /* seconds for CRIU to undo before it is killed */
static const double progress_period = 0.2;  /* seconds */

struct dump {
    const struct args *args;
    struct kc_result result;
    struct criu criu;
    struct criu_process process;
    struct guard guard;
    struct cuda cuda;
    struct tree before;     /* the tree when all was well */
    struct tree frozen;     /* the tree after CRIU */
    pid_t pid;              /* in the namespace that CRIU runs in */
    int pidfd;
    int images;
    struct io_caller caller;
    double started, deadline;
    double frozen_at, thawed_at; /* 0: not yet */
    uint64_t memory;        /* bytes the images will hold about */
    enum kc_reason undo;    /* why it is being undone, KC_OK when it is not */
    double kill_at;
};

/* What can be said beforehand in better words than CRIU's is said here. */
static bool examine(struct dump *dump)
{
    if (!rights_collect(&dump->before, dump->pid, &dump->result))
        return false;
    for (size_t i = 0; i < dump->before.count; i++) {
        struct proc_status status;
        pid_t pid = dump->before.tasks[i].pid;
        if (proc_status(pid, &status) && status.tracer != 0)
            return kc_fail(&dump->result, KC_CRIU_FAILED,
                           "Process %d is being traced (by process %d), by a debugger perhaps.",
                           pid, status.tracer);
        if (pid == getpid())
            return kc_fail(&dump->result, KC_USAGE,
                           "A process cannot capture a tree that it is part of.");
    }
    return true;
}

static bool start_criu(struct dump *dump)
{
    static char pid[16];
    static char ghost_limit[32];
    struct criu_args args = {.count = 0};
    snprintf(pid, sizeof(pid), "%d", dump->pid);
    snprintf(ghost_limit, sizeof(ghost_limit), "%llu",
             (unsigned long long)dump->args->ghost_limit);
    criu_common_args(&args, "dump", log_name);
    criu_arg(&args, "--tree");
    criu_arg(&args, pid);
    criu_arg(&args, "--ghost-limit");
    criu_arg(&args, ghost_limit);
    if (dump->cuda.shared != NULL)
        criu_no_plugins(&args);
    if (!criu_spawn(&dump->criu, &args, dump->images, &dump->process, &dump->result))
        return false;
    /* Only under guard does CRIU begin. */
    bool guarded = guard_start(&dump->guard, dump->pid, dump->process.pid,
                               dump->process.pidfd, &dump->before, &dump->result);
    dump->started = io_now();
    if (guarded && criu_go(&dump->process))
        return true;
    criu_close(&dump->process);
    waitpid(dump->process.pid, NULL, 0);
    guard_dismiss(&dump->guard);
    return kc_fail(&dump->result, KC_INTERNAL, "CRIU could not be started.");
}

static void undo(struct dump *dump, enum kc_reason why)
{
    if (dump->undo != KC_OK)
        return;
    dump->undo = why;
    dump->kill_at = io_now() + cancel_grace;
    if (dump->process.pid > 0)
        criu_cancel(&dump->process);
}

/* Waits for `fd` at most `most` ms. True when the caller said `resume`. */
static bool listen(struct dump *dump, int fd, int most)
{
    enum io_command heard = io_listen(&dump->caller, fd, most);
    if (heard == IO_CANCEL)
        undo(dump, KC_CANCELLED);
    return heard == IO_RESUME;
}

static void report_progress(const struct dump *dump)
{
    static struct json json;
    json_begin(&json, "progress");
    json_int(&json, "bytes", (int64_t)images_bytes(dump->images, true));
    json_int(&json, "total", (int64_t)dump->memory);
    json_send(&json, 0); /* a caller that does not read misses it */
}

static int wait_for_criu(struct dump *dump)
{
    double report_at = dump->started + progress_period;
    for (;;) {
        int status;
        pid_t pid = waitpid(dump->process.pid, &status, WNOHANG);
        if (pid == dump->process.pid)
            return status;
        double now = io_now();
        struct proc_stat stat;
        if (dump->frozen_at <= 0.0 && proc_stat(dump->pid, &stat) &&
            (stat.state == 't' || stat.state == 'T'))
            dump->frozen_at = now;
        if (dump->undo == KC_OK && now >= dump->deadline)
            undo(dump, KC_TIMEOUT);
        if (dump->undo != KC_OK && now >= dump->kill_at)
            sys_pidfd_signal(dump->process.pidfd, SIGKILL);
        if (now >= report_at) {
            report_progress(dump);
            report_at = now + progress_period;
        }
        /* Until the tree stands still it is looked at often: its stop is where the time counts. */
        listen(dump, dump->process.pidfd, dump->frozen_at <= 0.0 ? 1 : 100);
    }
}

static bool needs_window(const struct dump *dump)
{
    caps_raise_all();
    bool needed =
        window_needed(&dump->frozen, dump->args->window_dirs, dump->args->window_dir_count);
    caps_lower();
    return needed;
}

static void open_window(struct dump *dump)
{
    static struct json json;
    double deadline = io_now() + dump->args->window_timeout;
    /* CRIU has sent the stop; the last thread may still be on its way into it. */
    if (!tree_wait_stopped(&dump->frozen, deadline)) {
        undo(dump, KC_TIMEOUT);
        return;
    }
    json_begin(&json, "window");
    json_real(&json, "frozen_s", io_now() - dump->frozen_at);
    if (!json_send(&json, 1000)) {
        undo(dump, KC_CANCELLED);
        return;
    }
    while (dump->undo == KC_OK) {
        if (listen(dump, -1, io_until(deadline, 1000)))
            return;
        if (io_now() >= deadline)
            undo(dump, KC_TIMEOUT);
    }
}

static void settle(struct dump *dump, bool whole)
{
    repair_end(dump->frozen.count > 0 ? &dump->frozen : &dump->before);
    if (whole && dump->args->leave == LEAVE_KILLED) {
        for (size_t i = 0; i < dump->frozen.count; i++)
            tree_signal_task(&dump->frozen.tasks[i], SIGKILL);
    } else if (!whole || dump->args->leave != LEAVE_STOPPED) {
        if (dump->frozen.count > 0)
            tree_thaw(&dump->frozen, &dump->before);
        else
            tree_thaw(&dump->before, &dump->before);
    }
    dump->thawed_at = io_now();
    guard_dismiss(&dump->guard);
    if (whole && dump->args->leave == LEAVE_KILLED)
        cuda_end(&dump->cuda);
    else
        cuda_thaw(&dump->cuda);
}

/* False. Says why, if it was the caller or the clock. */
static bool given_up(struct dump *dump)
{
    if (dump->undo == KC_CANCELLED)
        return kc_fail(&dump->result, KC_CANCELLED, "The save was cancelled; the kernel runs on.");
    if (dump->undo == KC_TIMEOUT)
        return kc_fail(&dump->result, KC_TIMEOUT, "The save took too long; the kernel runs on.");
    return false;
}

/* Of more interest than why it failed is that the kernel is not well now. */
static void prefer_problem(struct dump *dump)
{
    if (dump->result.reason != KC_OK && dump->cuda.problem.reason != KC_OK)
        dump->result = dump->cuda.problem;
}

static void judge(struct dump *dump, bool criu_done, const char *words)
{
    given_up(dump); /* what failed first is what is told */
    if (dump->undo == KC_NO_SPACE || (!criu_done && criu_out_of_space(dump->images, log_name)))
        kc_fail(&dump->result, KC_NO_SPACE, "There is no space left for the images.");
    else if (!criu_done && sys_pidfd_signal(dump->pidfd, 0) != 0)
        kc_fail(&dump->result, KC_NO_PROCESS, "The kernel ended while it was being saved.");
    else if (!criu_done)
        kc_fail(&dump->result, KC_CRIU_FAILED, "The kernel could not be saved. %s", words);
    prefer_problem(dump);
}

static bool wait_for_gpu(void *data, int fd, int most)
{
    struct dump *dump = data;
    listen(dump, fd, dump->undo == KC_OK ? io_until(dump->deadline, most) : most);
    if (io_now() >= dump->deadline)
        undo(dump, KC_TIMEOUT);
    return dump->undo == KC_OK;
}

/* The GPU's memory comes into the processes before CRIU looks at them. */
static bool freeze_gpu(struct dump *dump)
{
    dump->cuda.folder = dump->args->gpu_to_store ? dump->images : 0;
    if (!cuda_begin(&dump->cuda, &dump->before, dump->args, wait_for_gpu, dump, &dump->result))
        return false;
    if (dump->cuda.shared == NULL)
        return true;
    if (dump->args->leave == LEAVE_STOPPED)
        return kc_fail(&dump->result, KC_USAGE, "A kernel that uses a GPU cannot be left stopped.");
    if (!cuda_freeze(&dump->cuda, &dump->result)) {
        if (dump->result.reason == KC_CANCELLED)
            dump->result = (struct kc_result){.reason = KC_OK};
        return given_up(dump);
    }
    /* Meanwhile the tree may have become another one. */
    if (dump->undo != KC_OK)
        given_up(dump);
    else if (!cuda_write_tasks(&dump->cuda, dump->images))
        kc_fail_errno(&dump->result, KC_NO_SPACE, errno, "The list of GPU tasks cannot be written");
    else if (dump->cuda.shared == NULL || examine(dump))
        return true;
    cuda_thaw(&dump->cuda);
    prefer_problem(dump);
    return false;
}

static bool capture(struct dump *dump)
{
    static struct json json;
    char words[128] = "";
    dump->deadline = io_now() + dump->args->timeout;
    if (!freeze_gpu(dump))
        return false;
    dump->memory = tree_memory(&dump->before);
    json_begin(&json, "dumping");
    json_int(&json, "tasks", (int64_t)dump->before.count);
    json_int(&json, "rss_bytes", (int64_t)dump->memory);
    json_send(&json, 1000);
    repair_note(&dump->before);
    if (!start_criu(dump)) {
        cuda_thaw(&dump->cuda);
        prefer_problem(dump);
        return false;
    }
    int status = wait_for_criu(dump);
    bool criu_done = criu_succeeded(status, words, sizeof(words));
    dump->process.pid = -1;
    if (dump->frozen_at <= 0.0)
        dump->frozen_at = dump->started;
    tree_collect(&dump->frozen, dump->pid, true);
    if (criu_done && !criu_write_stopped(dump->images, &dump->before))
        undo(dump, KC_NO_SPACE);
    bool whole = criu_done && dump->undo == KC_OK;
    if (whole && needs_window(dump)) {
        open_window(dump);
        whole = dump->undo == KC_OK;
    }
    settle(dump, whole);
    criu_close(&dump->process);
    judge(dump, criu_done, words);
    return dump->result.reason == KC_OK;
}

/* Names the process for good, and goes where it lives. */
static bool reach(struct dump *dump, int *exit_code)
{
    *exit_code = -1;
    dump->pidfd = sys_pidfd_open(dump->pid);
    if (dump->pidfd < 0 && errno == EINVAL)
        return kc_fail(&dump->result, KC_NO_PROCESS, "%d is a thread, not a process.", dump->pid);
    if (dump->pidfd < 0)
        return kc_fail(&dump->result, KC_NO_PROCESS, "There is no process %d.", dump->pid);
    ino_t theirs = proc_namespace(dump->pid, "pid");
    if (theirs == 0 || theirs == proc_namespace(0, "pid"))
        return true; /* what cannot be looked at is refused by the check of the owner */
    return examine(dump) && pidns_join(dump->pidfd, &dump->pid, exit_code, &dump->result);
}

static bool prepare(struct dump *dump)
{
    if (!io_hear(&dump->caller))
        return kc_fail_errno(&dump->result, KC_INTERNAL, errno, "signalfd");
    return examine(dump) && caps_can_capture(&dump->result) &&
           criu_find(&dump->criu, &dump->result);
}

int dump_command(const struct args *args)
{
    static struct json json;
    int exit_code = -1;
    struct dump dump = {.args = args,
                        .pid = args->pid,
                        .pidfd = -1,
                        .images = -1,
                        .caller = {.signals = -1},
                        .process = {.pid = -1, .pidfd = -1, .go = -1},
                        .guard = {.pid = -1, .pipe = -1}};
    dump.images = criu_open_images(args->images_dir, &dump.result);
    bool reached = dump.images >= 0 && reach(&dump, &exit_code);
    if (exit_code >= 0)
        return exit_code;
    if (!reached || !prepare(&dump) || !capture(&dump)) {
        criu_error_event(&dump.result, dump.images, log_name);
        return dump.result.reason == KC_USAGE ? 2 : 1;
    }
    json_begin(&json, "done");
    json_real(&json, "frozen_s", dump.thawed_at - dump.frozen_at);
    json_real(&json, "dump_s", dump.thawed_at - dump.started);
    json_int(&json, "image_bytes", (int64_t)images_bytes(dump.images, false));
    json_string(&json, "criu_version", dump.criu.version);
    images_report_left_out(dump.pid, &json);
    cuda_record(&dump.cuda, &json);
    json_send(&json, 5000);
    tree_free(&dump.before);
    tree_free(&dump.frozen);
    return 0;
}
