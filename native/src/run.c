/* SPDX-License-Identifier: BSD-3-Clause */
#include "run.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "caps.h"
#include "io.h"
#include "json.h"
#include "pidslot.h"
#include "procfs.h"
#include "supervise.h"

enum { ENV_BYTES = 8 * 1024 * 1024, ENV_ENTRIES = 65536 };

/* The first entry is the start of the one buffer that all of them are in. */
static char **read_environment(int fd, size_t *length_out, struct kc_result *result)
{
    size_t length;
    char *text = io_read_to_end(fd, ENV_BYTES, &length);
    if (text == NULL) {
        kc_fail_errno(result, KC_USAGE, errno, "The environment cannot be read");
        return NULL;
    }
    char **entries = calloc(ENV_ENTRIES + 1, sizeof(*entries));
    size_t count = 0;
    if (entries != NULL && length == 0)
        free(text);
    for (size_t i = 0; entries != NULL && i < length; i += strlen(text + i) + 1) {
        /* The buffer ends in a NUL of its own, so every entry does. */
        if (count == ENV_ENTRIES || strchr(text + i, '=') == NULL) {
            kc_fail(result, KC_USAGE, "The environment is not valid.");
            free(entries);
            free(text);
            return NULL;
        }
        entries[count++] = text + i;
    }
    if (entries == NULL) {
        free(text);
        kc_fail(result, KC_INTERNAL, "Out of memory.");
    }
    *length_out = length;
    return entries;
}

/* Runs in the child; comes back only with an errno value when the kernel cannot be started. */
static int become_kernel(const struct args *args, char **environment, int null, int log,
                         pid_t supervisor)
{
    sys_default_signals();
    setsid();
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (getppid() != supervisor)
        _exit(127); /* it died before it could be noticed */
    if (!caps_drop_to_callers())
        return errno;
    if (dup2(null, STDIN_FILENO) < 0 || dup2(log, STDOUT_FILENO) < 0 ||
        dup2(log, STDERR_FILENO) < 0)
        return errno;
    if (environment != NULL)
        environ = environment;
    execvp(args->program[0], args->program);
    return errno;
}

static bool start(const struct args *args, struct supervisor *supervisor, struct kc_result *result)
{
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    int log = open(args->log, O_WRONLY | O_APPEND | O_CREAT | O_NOFOLLOW | O_NOCTTY | O_CLOEXEC,
                   0600);
    struct stat info;
    int failed[2];
    if (log < 0 || fstat(log, &info) != 0)
        return kc_fail_errno(result, KC_USAGE, errno, "The log file cannot be opened");
    if (!S_ISREG(info.st_mode))
        return kc_fail(result, KC_USAGE, "The log file is not a regular file.");
    if (null < 0 || pipe2(failed, O_CLOEXEC) != 0)
        return kc_fail_errno(result, KC_INTERNAL, errno, "The kernel cannot be started");
    char **environment = NULL;
    size_t environment_bytes = 0;
    if (args->env_fd >= 0) {
        environment = read_environment(args->env_fd, &environment_bytes, result);
        if (environment == NULL)
            return false;
        close(args->env_fd);
    }
    pid_t self = getpid();
    pidslot_choose();
    pid_t pid = fork();
    int error = errno;
    if (pid == 0) {
        /* Nothing of the caller's reaches the kernel but fds 0 to 2. */
        error = sys_close_on_exec_from(3) == 0
                    ? become_kernel(args, environment, null, log, self)
                    : errno;
        io_write_all(failed[1], &error, sizeof(error));
        _exit(127);
    }
    if (environment != NULL) {
        /* It may hold secrets, and this process lives long. */
        if (environment[0] != NULL)
            explicit_bzero(environment[0], environment_bytes);
        free(environment[0]);
        free(environment);
    }
    if (pid < 0)
        return kc_fail_errno(result, KC_INTERNAL, error, "fork");
    supervisor->root = pid;
    io_close(&null);
    io_close(&log);
    io_close(&failed[1]);
    error = 0;
    ssize_t n;
    do
        n = read(failed[0], &error, sizeof(error));
    while (n < 0 && errno == EINTR);
    io_close(&failed[0]);
    if (n == (ssize_t)sizeof(error))
        return kc_fail_errno(result, KC_EXEC_FAILED, error, "%.200s cannot be started",
                             args->program[0]);
    return true;
}

int run_command(const struct args *args)
{
    static struct json json;
    struct kc_result result = {0};
    struct supervisor supervisor;
    if (!supervise_init(&supervisor, &result) || !start(args, &supervisor, &result)) {
        event_error(&result);
        supervise_abandon(&supervisor);
        return result.reason == KC_USAGE ? 2 : 1;
    }
    struct proc_stat stat;
    json_begin(&json, "started");
    json_int(&json, "pid", supervisor.root);
    if (proc_stat(supervisor.root, &stat))
        json_int(&json, "starttime", (int64_t)stat.starttime);
    else
        json_null(&json, "starttime");
    json_send(&json, 5000);
    return supervise(&supervisor);
}
