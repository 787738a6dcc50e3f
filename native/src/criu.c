/* SPDX-License-Identifier: BSD-3-Clause */
#include "criu.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "caps.h"
#include "config.h"
#include "io.h"
#include "procfs.h"
#include "trust.h"

enum { LEAST_MAJOR = 4, LEAST_MINOR = 2, ERROR_LINES = 10, ERROR_LINE_MAX = 500 };

static const off_t tail_bytes = (off_t)256 * 1024; /* of the log are read at most */

static char *const criu_environment[] = {
    (char[]){"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, (char[]){"LC_ALL=C"}, NULL};

bool criu_parse_version(const char *text, char *version, size_t capacity, bool *new_enough)
{
    const char *found = strstr(text, "Version:");
    if (found == NULL)
        return false;
    found += strlen("Version:");
    found += strspn(found, " \t");
    size_t length = strspn(found, "0123456789.");
    if (length == 0 || length >= capacity)
        return false;
    memcpy(version, found, length);
    version[length] = '\0';
    char *end;
    unsigned long major = strtoul(version, &end, 10);
    unsigned long minor = *end == '.' ? strtoul(end + 1, NULL, 10) : 0;
    *new_enough = major > LEAST_MAJOR || (major == LEAST_MAJOR && minor >= LEAST_MINOR);
    return true;
}

/* In the child: signals as a new program expects them, nothing inherited but fds 0 to 2. */
static void child_setup(int in, int out)
{
    sys_default_signals();
    if (in >= 0)
        dup2(in, STDIN_FILENO);
    if (out >= 0) {
        dup2(out, STDOUT_FILENO);
        dup2(out, STDERR_FILENO);
    }
    if (sys_close_from(3) != 0)
        _exit(126);
}

static bool read_version(struct criu *criu, bool *new_enough)
{
    int output[2];
    if (pipe2(output, O_CLOEXEC) != 0)
        return false;
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    pid_t pid = fork();
    if (pid == 0) {
        char option[] = "--version";
        char *argv[] = {criu->path, option, NULL};
        child_setup(null, output[1]);
        caps_drop_to_callers();
        execve(criu->path, argv, criu_environment);
        _exit(127);
    }
    io_close(&null);
    io_close(&output[1]);
    char text[4096] = "";
    size_t used = 0;
    double deadline = io_now() + 5.0;
    while (pid > 0 && used + 1 < sizeof(text)) {
        struct pollfd ready = {.fd = output[0], .events = POLLIN};
        if (poll(&ready, 1, io_until(deadline, 5000)) <= 0)
            break;
        ssize_t n = read(output[0], text + used, sizeof(text) - 1 - used);
        if (n <= 0)
            break;
        used += (size_t)n;
    }
    io_close(&output[0]);
    if (pid <= 0)
        return false;
    text[used] = '\0';
    kill(pid, SIGKILL);
    sys_wait(pid, NULL);
    return criu_parse_version(text, criu->version, sizeof(criu->version), new_enough);
}

bool criu_find(struct criu *criu, struct kc_result *result)
{
    char beside[PATH_MAX] = "";
    ssize_t length = readlink("/proc/self/exe", beside, sizeof(beside) - 1);
    char *slash = NULL;
    if (length > 0) {
        beside[length] = '\0';
        slash = strrchr(beside, '/');
    }
    if (slash != NULL && (size_t)(slash - beside) + sizeof("/criu") <= sizeof(beside))
        memcpy(slash, "/criu", sizeof("/criu"));
    else
        beside[0] = '\0';
    const char *const places[] = {KC_CRIU_PATH,
                                  beside,
                                  "/opt/jupyter-gpu-ckpt/criu/criu",
                                  "/usr/local/sbin/criu",
                                  "/usr/sbin/criu",
                                  "/usr/bin/criu"};
    char said[256] = "";
    uid_t other = caps_beyond_caller() ? 0 : getuid();
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        const char *why = NULL;
        bool new_enough = false;
        if (places[i][0] == '\0' || access(places[i], F_OK) != 0)
            continue;
        if (!trust_resolve(places[i], other, criu->path, &why))
            snprintf(said, sizeof(said), " %.150s is not used: %s.", places[i], why);
        else if (!read_version(criu, &new_enough))
            snprintf(said, sizeof(said), " %.150s does not run.", places[i]);
        else if (!new_enough)
            snprintf(said, sizeof(said), " %.150s is too old (%s).", places[i], criu->version);
        else
            return true;
    }
    criu->path[0] = '\0';
    return kc_fail(result, KC_NO_CRIU, "No usable CRIU (4.2 or newer) was found.%s", said);
}

void criu_arg(struct criu_args *args, const char *arg)
{
    if (args->count + 1 >= CRIU_ARGS_MAX)
        args->overflow = true;
    else
        args->argv[args->count++] = arg;
}

void criu_common_args(struct criu_args *args, const char *command, const char *log)
{
    static const char *const common[] = {"--file-locks",         "--link-remap",
                                         "--ext-unix-sk",        "--tcp-established",
                                         "--skip-in-flight",     "--network-lock",
                                         "skip",                 "--manage-cgroups=ignore",
                                         "--leave-stopped"};
    criu_arg(args, "criu");
    criu_arg(args, command);
    criu_arg(args, "--no-default-config");
    criu_arg(args, "--images-dir");
    criu_arg(args, ".");
    criu_arg(args, "--log-file");
    criu_arg(args, log);
    criu_arg(args, "-v2");
    for (size_t i = 0; i < sizeof(common) / sizeof(common[0]); i++)
        criu_arg(args, common[i]);
    if (caps_unprivileged())
        criu_arg(args, "--unprivileged");
}

void criu_no_plugins(struct criu_args *args)
{
    criu_arg(args, "--libdir");
    criu_arg(args, "/proc/self/ns"); /* a folder that is always there and has no plugin in it */
}

int criu_open_images(const char *path, struct kc_result *result)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) {
        kc_fail_errno(result, KC_USAGE, errno, "The image directory cannot be opened");
        return -1;
    }
    struct stat info;
    if (fstat(fd, &info) != 0 || info.st_uid != getuid())
        kc_fail(result, KC_NOT_YOURS, "The image directory does not belong to the caller.");
    else if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0)
        kc_fail(result, KC_USAGE, "The image directory can be written by others.");
    else
        return fd;
    io_close(&fd);
    return -1;
}

static const char stopped_name[] = "stopped-tasks";

bool criu_write_stopped(int images, const struct tree *before)
{
    int fd = -1;
    bool done = true;
    for (size_t i = 0; done && i < before->count; i++) {
        char line[16];
        if (before->tasks[i].state != 'T')
            continue;
        if (fd < 0)
            fd = openat(images, stopped_name,
                        O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
        int length = snprintf(line, sizeof(line), "%d\n", before->tasks[i].pid);
        done = fd >= 0 && io_write_all(fd, line, (size_t)length);
    }
    io_close(&fd);
    return done;
}

void criu_mark_stopped(int images, struct tree *tree)
{
    static char text[TREE_MAX * 8];
    static pid_t pids[TREE_MAX];
    ssize_t count = 0;
    if (io_read_file_at(images, stopped_name, text, sizeof(text)) > 0)
        count = proc_parse_pids(text, pids, TREE_MAX);
    for (size_t i = 0; i < tree->count; i++) {
        tree->tasks[i].state = 'R';
        for (ssize_t k = 0; k < count; k++)
            if (pids[k] == tree->tasks[i].pid)
                tree->tasks[i].state = 'T';
    }
}

bool criu_spawn(const struct criu *criu, const struct criu_args *args, int images,
                struct criu_process *process, struct kc_result *result)
{
    *process = (struct criu_process){.pid = -1, .pidfd = -1, .go = -1};
    if (args->overflow)
        return kc_fail(result, KC_INTERNAL, "Too many arguments for CRIU.");
    int go[2] = {-1, -1};
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    /* O_NONBLOCK here and elsewhere: a FIFO in the place of a file must not hold this program up. */
    int output = openat(images, "criu.out",
                        O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
    if (null < 0 || output < 0 || pipe2(go, O_CLOEXEC) != 0) {
        kc_fail_errno(result, errno == ENOSPC ? KC_NO_SPACE : KC_INTERNAL, errno,
                      "CRIU's output file cannot be opened");
        io_close(&null);
        io_close(&output);
        return false;
    }
    pid_t pid = fork();
    if (pid == 0) {
        char byte;
        io_close(&go[1]);
        umask(077);
        setsid();
        if (fchdir(images) != 0 || !caps_give_to_criu() || read(go[0], &byte, 1) != 1)
            _exit(126);
        child_setup(null, output);
        /* Ignored over exec: a write beyond a limit then is an error CRIU can undo things after. */
        signal(SIGXFSZ, SIG_IGN);
        char *argv[CRIU_ARGS_MAX];
        for (unsigned i = 0; i <= args->count; i++)
            argv[i] = args->argv[i] == NULL ? NULL : strdup(args->argv[i]);
        execve(criu->path, argv, criu_environment);
        _exit(127);
    }
    int error = errno;
    io_close(&null);
    io_close(&output);
    io_close(&go[0]);
    if (pid < 0) {
        io_close(&go[1]);
        return kc_fail_errno(result, KC_INTERNAL, error, "fork");
    }
    process->pid = pid;
    process->go = go[1];
    process->pidfd = sys_pidfd_open(pid);
    if (process->pidfd < 0) {
        error = errno;
        criu_close(process);
        sys_wait(pid, NULL);
        return kc_fail_errno(result, KC_INTERNAL, error, "pidfd_open");
    }
    return true;
}

bool criu_go(struct criu_process *process)
{
    bool done = io_write_all(process->go, "g", 1);
    io_close(&process->go);
    return done;
}

void criu_cancel(const struct criu_process *process)
{
    struct rlimit nothing = {.rlim_cur = 0, .rlim_max = 0};
    if (prlimit(process->pid, RLIMIT_FSIZE, &nothing, NULL) != 0)
        kc_log("prlimit: %s", strerror(errno));
}

void criu_close(struct criu_process *process)
{
    io_close(&process->go);
    io_close(&process->pidfd);
}

bool criu_succeeded(int status, char *text, size_t capacity)
{
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return true;
    if (WIFEXITED(status))
        snprintf(text, capacity, "CRIU ended with status %d.", WEXITSTATUS(status));
    else
        snprintf(text, capacity, "CRIU was ended by signal %d.", WTERMSIG(status));
    return false;
}

/* The end of the log, from the start of a line on. */
static char *log_tail(int images, const char *log)
{
    int fd = openat(images, log, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    struct stat info;
    char *text = NULL;
    size_t length = 0;
    if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode)) {
        if (info.st_size > tail_bytes)
            lseek(fd, -tail_bytes, SEEK_END);
        text = io_read_to_end(fd, 2 * (size_t)tail_bytes, &length);
    }
    io_close(&fd);
    if (text != NULL)
        for (size_t i = 0; i < length; i++)
            if (text[i] == '\0')
                text[i] = ' ';
    return text;
}

void criu_error_event(const struct kc_result *result, int images, const char *log)
{
    static struct json json;
    char *text = images >= 0 && log != NULL ? log_tail(images, log) : NULL;
    const char *lines[ERROR_LINES];
    size_t count = 0;
    for (char *line = text; line != NULL && *line != '\0';) {
        char *end = strchrnul(line, '\n');
        bool more = *end == '\n';
        *end = '\0';
        /* CRIU goes on happily after the second, which many containers bring about. */
        if (strstr(line, "Error") != NULL && strstr(line, "Can't setup RLIMIT_NOFILE") == NULL) {
            if (count == ERROR_LINES)
                memmove(lines, lines + 1, (ERROR_LINES - 1) * sizeof(lines[0]));
            else
                count++;
            lines[count - 1] = line;
        }
        line = more ? end + 1 : end;
    }
    kc_log("%s: %s", kc_reason_name(result->reason), result->message);
    json_begin(&json, "error");
    json_string(&json, "reason", kc_reason_name(result->reason));
    json_string(&json, "message",
                result->message[0] != '\0' ? result->message : kc_reason_words(result->reason));
    json_open(&json, "criu_errors", '[');
    for (size_t i = 0; i < count; i++)
        json_string_n(&json, NULL, lines[i], strnlen(lines[i], ERROR_LINE_MAX));
    json_close(&json);
    json_string(&json, "log", text != NULL ? log : NULL);
    json_send(&json, 5000);
    free(text);
}

bool criu_out_of_space(int images, const char *log)
{
    struct statvfs space;
    if (fstatvfs(images, &space) == 0 && space.f_blocks > 0 &&
        ((uint64_t)space.f_bavail * space.f_frsize < 65536 ||
         (space.f_files > 0 && space.f_favail == 0)))
        return true;
    char *text = log_tail(images, log);
    bool out = text != NULL && (strstr(text, "No space left on device") != NULL ||
                                strstr(text, "Disk quota exceeded") != NULL);
    free(text);
    return out;
}
