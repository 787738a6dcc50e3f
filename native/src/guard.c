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

/* Ends the trees whose roots were children of the program that died: they have one of the numbers,
 * the parent that this process has got too, and came later than it. */
static bool end_orphans(const pid_t *pids, size_t count, unsigned long long born)
{
    bool found = false;
    struct tree tree = {0};
    for (size_t i = 0; i < count; i++) {
        struct proc_stat stat;
        if (!proc_stat(pids[i], &stat) || stat.pid != pids[i] || stat.ppid != getppid() ||
            stat.starttime < born || stat.state == 'Z' || !tree_collect(&tree, pids[i], true))
            continue;
        found = true;
        for (size_t k = 0; k < tree.count; k++)
            tree_signal_task(&tree.tasks[k], SIGKILL);
    }
    tree_free(&tree);
    return found;
}

__attribute__((noreturn)) static void stand_guard_restore(int in, int criu_pidfd, const pid_t *pids,
                                                          size_t count)
{
    char byte;
    ssize_t n;
    do
        n = read(in, &byte, 1);
    while (n < 0 && errno == EINTR);
    if (n == 1)
        _exit(0);
    struct pollfd over = {.fd = criu_pidfd, .events = POLLIN};
    struct proc_stat self;
    sys_pidfd_signal(criu_pidfd, SIGKILL);
    poll(&over, 1, 5000);
    if (!proc_stat(getpid(), &self))
        _exit(1);
    /* What is killed may leave children to the same parent: until none is seen any more. */
    for (int quiet = 0; quiet < 5; quiet++) {
        if (end_orphans(pids, count, self.starttime))
            quiet = 0;
        io_sleep_ms(20);
    }
    _exit(0);
}

/* In the child: out of reach of what may end the program, its group, its terminal, its signals. */
static void detach(void)
{
    setsid();
    for (int number = 1; number < NSIG; number++)
        if (number != SIGKILL && number != SIGSTOP && number != SIGCHLD)
            signal(number, SIG_IGN);
}

static pid_t fork_guard(struct guard *guard, int *in, struct kc_result *result)
{
    int ends[2];
    *guard = (struct guard){.pid = -1, .pipe = -1};
    if (pipe2(ends, O_CLOEXEC) != 0) {
        kc_fail_errno(result, KC_INTERNAL, errno, "The guard cannot be started");
        return -1;
    }
    pid_t pid = fork();
    if (pid == 0) {
        detach();
        io_close(&ends[1]);
        *in = ends[0];
        return 0;
    }
    int error = errno;
    io_close(&ends[0]);
    if (pid < 0) {
        io_close(&ends[1]);
        kc_fail_errno(result, KC_INTERNAL, error, "fork");
        return -1;
    }
    guard->pid = pid;
    guard->pipe = ends[1];
    return pid;
}

bool guard_start(struct guard *guard, pid_t root_pid, pid_t criu, int criu_pidfd,
                 const struct tree *before, struct kc_result *result)
{
    int in = -1;
    const struct tree_task *root = tree_find(before, root_pid);
    *guard = (struct guard){.pid = -1, .pipe = -1};
    if (root == NULL)
        return kc_fail(result, KC_INTERNAL, "The guard has nothing to guard.");
    pid_t pid = fork_guard(guard, &in, result);
    if (pid == 0)
        stand_guard(in, root, criu, criu_pidfd, before);
    return pid > 0;
}

bool guard_start_restore(struct guard *guard, int criu_pidfd, const pid_t *pids, size_t count,
                         struct kc_result *result)
{
    int in = -1;
    pid_t pid = fork_guard(guard, &in, result);
    if (pid == 0)
        stand_guard_restore(in, criu_pidfd, pids, count);
    return pid > 0;
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
