/* SPDX-License-Identifier: BSD-3-Clause */
#include "guard.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include "io.h"
#include "procfs.h"
#include "repair.h"

static const double criu_grace = 30.0; /* seconds for CRIU to undo what it did */

static void wait_for_criu(pid_t criu, int criu_pidfd)
{
    struct rlimit nothing = {.rlim_cur = 0, .rlim_max = 0};
    struct pollfd over = {.fd = criu_pidfd, .events = POLLIN};
    if (poll(&over, 1, 0) == 1)
        return;
    /* While it has not ended its number is its own. */
    prlimit(criu, RLIMIT_FSIZE, &nothing, NULL);
    double deadline = io_now() + criu_grace;
    while (io_now() < deadline)
        if (poll(&over, 1, io_until(deadline, 1000)) == 1)
            return;
    sys_pidfd_signal(criu_pidfd, SIGKILL);
    poll(&over, 1, 5000);
}

__attribute__((noreturn)) static void stand_guard(int in, const struct tree_task *root, pid_t criu,
                                                  int criu_pidfd, const struct tree *before)
{
    char byte;
    ssize_t n;
    do
        n = read(in, &byte, 1);
    while (n < 0 && errno == EINTR);
    if (n == 1)
        _exit(0);
    wait_for_criu(criu, criu_pidfd);
    struct tree tree = {0};
    struct proc_stat stat;
    if (proc_stat(root->pid, &stat) && stat.starttime == root->starttime &&
        tree_collect(&tree, root->pid, true)) {
        repair_end(&tree);
        tree_thaw(&tree, before);
    }
    _exit(0);
}

bool guard_start(struct guard *guard, pid_t root_pid, pid_t criu, int criu_pidfd,
                 const struct tree *before, struct kc_result *result)
{
    const struct tree_task *root = tree_find(before, root_pid);
    int ends[2];
    *guard = (struct guard){.pid = -1, .pipe = -1};
    if (root == NULL || pipe2(ends, O_CLOEXEC) != 0)
        return kc_fail_errno(result, KC_INTERNAL, errno, "The guard cannot be started");
    pid_t pid = fork();
    if (pid < 0) {
        int error = errno;
        io_close(&ends[0]);
        io_close(&ends[1]);
        return kc_fail_errno(result, KC_INTERNAL, error, "fork");
    }
    if (pid == 0) {
        /* Out of reach of what may end this program: its group, its terminal, its signals. */
        setsid();
        for (int number = 1; number < NSIG; number++)
            if (number != SIGKILL && number != SIGSTOP && number != SIGCHLD)
                signal(number, SIG_IGN);
        close(ends[1]);
        stand_guard(ends[0], root, criu, criu_pidfd, before);
    }
    io_close(&ends[0]);
    guard->pid = pid;
    guard->pipe = ends[1];
    return true;
}

void guard_dismiss(struct guard *guard)
{
    if (guard->pid < 0)
        return;
    io_write_all(guard->pipe, "d", 1);
    io_close(&guard->pipe);
    sys_wait(guard->pid, NULL);
    guard->pid = -1;
}
