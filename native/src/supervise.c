/* SPDX-License-Identifier: BSD-3-Clause */
#include "supervise.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hold.h"
#include "json.h"
#include "tree.h"

/* All but the first one are forwarded. */
static const int collected[] = {SIGCHLD, SIGINT,  SIGTERM, SIGHUP,  SIGQUIT,
                                SIGUSR1, SIGUSR2, SIGCONT, SIGALRM, SIGWINCH};

static const double term_grace = 2.0;  /* seconds between SIGTERM and SIGKILL */
static const double reap_limit = 15.0; /* seconds for killed processes to go away */

bool supervise_init(struct supervisor *supervisor, struct kc_result *result)
{
    memset(supervisor, 0, sizeof(*supervisor));
    supervisor->signals = sys_collect_signals(collected, sizeof(collected) / sizeof(collected[0]));
    if (supervisor->signals < 0)
        return kc_fail_errno(result, KC_INTERNAL, errno, "signalfd");
    if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0)
        return kc_fail_errno(result, KC_INTERNAL, errno, "PR_SET_CHILD_SUBREAPER");
    return true;
}

static void note_end(pid_t pid, int status, void *data)
{
    struct supervisor *supervisor = data;
    if (pid == supervisor->root && !supervisor->over) {
        supervisor->over = true;
        supervisor->status = status;
    }
}

void supervise_reap(struct supervisor *supervisor)
{
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG | __WALL);
        if (pid > 0) {
            if (WIFEXITED(status) || WIFSIGNALED(status))
                note_end(pid, status, supervisor);
        } else if (pid == 0 || errno != EINTR) {
            return;
        }
    }
}

static void release(struct supervisor *supervisor, const char *by)
{
    static struct json json;
    if (!supervisor->held)
        return;
    supervisor->held = false;
    hold_end(supervisor->root);
    json_begin(&json, "released");
    json_string(&json, "by", by);
    json_send(&json, 1000);
}

static void kill_tree(struct supervisor *supervisor)
{
    supervisor->killed = true;
    struct tree tree = {0};
    if (tree_collect(&tree, getpid(), false))
        for (size_t i = 0; i < tree.count; i++)
            tree_signal_task(&tree.tasks[i], SIGKILL);
    tree_free(&tree);
    kill(supervisor->root, SIGKILL);
}

/* The server is gone: the kernel gets the chance to end by itself. */
static void end_in_order(struct supervisor *supervisor)
{
    if (supervisor->kill_at > 0.0)
        return;
    supervisor->kill_at = io_now() + term_grace;
    release(supervisor, "caller");
    kill(-supervisor->root, SIGTERM);
    kill(-supervisor->root, SIGCONT);
}

static void handle_commands(struct supervisor *supervisor)
{
    io_fill(&supervisor->lines, STDIN_FILENO);
    for (;;) {
        switch (io_next(&supervisor->lines)) {
        case IO_NONE:
            return;
        case IO_EOF:
            end_in_order(supervisor);
            return;
        case IO_KILL:
            kill_tree(supervisor);
            break;
        case IO_RELEASE:
            release(supervisor, "caller");
            break;
        case IO_CANCEL:
        case IO_RESUME:
        case IO_UNKNOWN:
            kc_log("a line on stdin is not a command here");
            break;
        }
    }
}

static void handle_signals(struct supervisor *supervisor)
{
    struct signalfd_siginfo info;
    while (read(supervisor->signals, &info, sizeof(info)) == (ssize_t)sizeof(info))
        if (info.ssi_signo != SIGCHLD)
            kill(-supervisor->root, (int)info.ssi_signo);
}

static int next_timeout(const struct supervisor *supervisor)
{
    int timeout = 60000;
    if (supervisor->held)
        timeout = io_until(supervisor->hold_deadline, timeout);
    if (supervisor->kill_at > 0.0 && !supervisor->killed)
        timeout = io_until(supervisor->kill_at, timeout);
    return timeout;
}

int supervise(struct supervisor *supervisor)
{
    static struct json json;
    for (;;) {
        supervise_reap(supervisor);
        if (supervisor->over)
            break;
        struct pollfd fds[2] = {{.fd = supervisor->signals, .events = POLLIN},
                                {.fd = supervisor->lines.eof ? -1 : STDIN_FILENO, .events = POLLIN}};
        poll(fds, 2, next_timeout(supervisor));
        if (fds[0].revents != 0)
            handle_signals(supervisor);
        if (fds[1].revents != 0)
            handle_commands(supervisor);
        if (supervisor->held && io_now() >= supervisor->hold_deadline)
            release(supervisor, "timeout");
        if (supervisor->kill_at > 0.0 && io_now() >= supervisor->kill_at && !supervisor->killed)
            kill_tree(supervisor);
    }
    supervise_abandon(supervisor);
    int code = WIFEXITED(supervisor->status) ? WEXITSTATUS(supervisor->status)
                                             : 128 + WTERMSIG(supervisor->status);
    json_begin(&json, "exited");
    if (WIFEXITED(supervisor->status)) {
        json_int(&json, "code", code);
        json_null(&json, "signal");
    } else {
        json_null(&json, "code");
        json_int(&json, "signal", WTERMSIG(supervisor->status));
    }
    json_send(&json, 1000);
    return code;
}

void supervise_abandon(struct supervisor *supervisor)
{
    if (!tree_end_descendants(io_now() + reap_limit, note_end, supervisor))
        kc_log("some processes of the tree could not be ended");
}
