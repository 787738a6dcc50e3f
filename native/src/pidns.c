/* SPDX-License-Identifier: BSD-3-Clause */
#include "pidns.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/nsfs.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "caps.h"
#include "io.h"
#include "procfs.h"

static const int relayed[] = {SIGINT,  SIGTERM, SIGHUP,  SIGQUIT, SIGUSR1,
                              SIGUSR2, SIGCONT, SIGALRM, SIGWINCH};

static int outer_proc = -1; /* the outer /proc, kept open in the inner process */

bool pidns_inside(void)
{
    return outer_proc >= 0;
}

/* A mount namespace of one's own, in which later mounts of the node still show up, with a /proc that
 * fits the PID namespace. Returns an errno value. */
static int mount_proc(void)
{
    if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) != 0 ||
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) != 0)
        return errno;
    return 0;
}

bool pidns_possible(void)
{
    if (!caps_permitted(CAP_SYS_ADMIN))
        return false;
    pid_t pid = fork();
    if (pid == 0) {
        caps_raise(CAP_SYS_ADMIN);
        if (unshare(CLONE_NEWPID) != 0)
            _exit(1);
        pid_t inner = fork();
        if (inner == 0)
            _exit(mount_proc() == 0 ? 0 : 1);
        int inner_status = 1;
        if (inner > 0)
            waitpid(inner, &inner_status, 0);
        _exit(inner > 0 && WIFEXITED(inner_status) ? WEXITSTATUS(inner_status) : 1);
    }
    int status = 1;
    return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) &&
           WEXITSTATUS(status) == 0;
}

/* The outer process has nothing to say any more: it hands signals in and the exit status out. */
static int relay(pid_t inner, int signals)
{
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null >= 0) {
        /* The lifeline and the events belong to the inner process alone. */
        dup2(null, STDIN_FILENO);
        dup2(null, STDOUT_FILENO);
        io_close(&null);
    }
    for (;;) {
        int status;
        pid_t got = waitpid(inner, &status, WNOHANG);
        if (got == inner && WIFEXITED(status))
            return WEXITSTATUS(status);
        if (got == inner && WIFSIGNALED(status))
            return 128 + WTERMSIG(status);
        if (got < 0 && errno != EINTR)
            return 1;
        struct signalfd_siginfo info;
        if (read(signals, &info, sizeof(info)) == (ssize_t)sizeof(info) &&
            info.ssi_signo != SIGCHLD)
            kill(inner, (int)info.ssi_signo);
    }
}

static int relay_signals(struct kc_result *result)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    for (size_t i = 0; i < sizeof(relayed) / sizeof(relayed[0]); i++)
        sigaddset(&set, relayed[i]);
    signal(SIGCHLD, SIG_DFL);
    int fd = -1;
    if (sigprocmask(SIG_BLOCK, &set, NULL) != 0 || (fd = signalfd(-1, &set, SFD_CLOEXEC)) < 0)
        kc_fail_errno(result, KC_INTERNAL, errno, "signalfd");
    return fd;
}

/* The common part: a child in the namespaces set up by `enter`, which returns an errno value and runs
 * in the child. */
static bool split(int death_signal, int (*enter)(void), int *exit_code, struct kc_result *result)
{
    int ready[2];
    int signals = relay_signals(result);
    if (signals < 0)
        return false;
    if (pipe2(ready, O_CLOEXEC) != 0)
        return kc_fail_errno(result, KC_INTERNAL, errno, "pipe");
    pid_t inner = fork();
    if (inner < 0)
        return kc_fail_errno(result, KC_INTERNAL, errno, "fork");
    if (inner == 0) {
        io_close(&ready[0]);
        io_close(&signals);
        prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0);
        int error = enter();
        bool told = io_write_all(ready[1], &error, sizeof(error));
        io_close(&ready[1]);
        if (error != 0 || !told)
            _exit(1);
        *exit_code = -1;
        return true;
    }
    io_close(&ready[1]);
    int error = 0;
    ssize_t n;
    do
        n = read(ready[0], &error, sizeof(error));
    while (n < 0 && errno == EINTR);
    io_close(&ready[0]);
    int code = n == (ssize_t)sizeof(error) && error == 0 ? relay(inner, signals) : -1;
    io_close(&signals);
    if (code < 0) {
        waitpid(inner, NULL, 0);
        return kc_fail_errno(result, KC_NO_CAPABILITY, n == (ssize_t)sizeof(error) ? error : EPIPE,
                             "The PID namespace cannot be entered");
    }
    *exit_code = code;
    return true;
}

static int enter_new(void)
{
    caps_raise(CAP_SYS_ADMIN);
    int error = mount_proc();
    caps_lower();
    if (error != 0)
        return error;
    outer_proc = proc_open();
    return proc_fd() < 0 ? ENOENT : 0;
}

bool pidns_enter(int *exit_code, struct kc_result *result)
{
    caps_raise(CAP_SYS_ADMIN);
    int done = unshare(CLONE_NEWPID);
    int error = errno;
    caps_lower();
    if (done != 0)
        return kc_fail_errno(result, KC_NO_CAPABILITY, error, "A PID namespace cannot be made");
    return split(SIGKILL, enter_new, exit_code, result);
}

static int join_pidfd;

static int enter_joined(void)
{
    /* This process was forked into the PID namespace already; the mounts are its own affair. */
    caps_raise(CAP_SYS_ADMIN);
    caps_raise(CAP_SYS_CHROOT);
    int error = setns(join_pidfd, CLONE_NEWNS) == 0 ? 0 : errno;
    caps_lower();
    if (error != 0)
        return error;
    int old = proc_open();
    io_close(&old);
    return proc_fd() < 0 ? ENOENT : 0;
}

/* Whether a namespace belongs to the user namespace that this process is in. */
static bool owned_here(pid_t pid, const char *name)
{
    char path[64];
    struct stat owner;
    bool same = false;
    snprintf(path, sizeof(path), "%d/ns/%s", pid, name);
    int fd = openat(proc_fd(), path, O_RDONLY | O_CLOEXEC);
    int user = fd < 0 ? -1 : ioctl(fd, NS_GET_USERNS);
    if (user >= 0)
        same = fstat(user, &owner) == 0 && owner.st_ino == proc_namespace(0, "user");
    io_close(&user);
    io_close(&fd);
    return same;
}

bool pidns_join(int pidfd, pid_t *pid, int *exit_code, struct kc_result *result)
{
    struct proc_status status;
    if (!caps_permitted(CAP_SYS_ADMIN))
        return kc_fail(result, KC_NO_CAPABILITY,
                       "The process is in another PID namespace, which needs SYS_ADMIN.");
    if (!proc_status(*pid, &status) || status.nspid_count < 2)
        return kc_fail(result, KC_NOT_YOURS, "The process is in a PID namespace out of reach.");
    if (!owned_here(*pid, "pid") || !owned_here(*pid, "mnt") ||
        proc_namespace(*pid, "user") != proc_namespace(0, "user"))
        return kc_fail(result, KC_NOT_YOURS, "The process is in namespaces of another user.");
    if (sys_pidfd_signal(pidfd, 0) != 0)
        return kc_fail(result, KC_NO_PROCESS, "Process %d has ended.", *pid);
    *pid = status.nspid[status.nspid_count - 1];
    join_pidfd = pidfd;
    caps_raise(CAP_SYS_ADMIN);
    int done = setns(pidfd, CLONE_NEWPID);
    int error = errno;
    caps_lower();
    if (done != 0)
        return kc_fail_errno(result, KC_NO_CAPABILITY, error, "The PID namespace cannot be joined");
    return split(SIGTERM, enter_joined, exit_code, result);
}

pid_t pidns_outer_pid(pid_t pid)
{
    pid_t children[64];
    if (outer_proc < 0)
        return pid;
    ssize_t count = proc_children_at(outer_proc, "self", children, 64);
    for (ssize_t i = 0; i < count; i++) {
        char name[32];
        char text[16384];
        struct proc_status status;
        snprintf(name, sizeof(name), "%d/status", children[i]);
        if (io_read_file_at(outer_proc, name, text, sizeof(text)) > 0 &&
            proc_parse_status(text, &status) && status.nspid_count > 0 &&
            status.nspid[status.nspid_count - 1] == pid)
            return children[i];
    }
    return pid;
}
