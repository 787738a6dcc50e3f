/* SPDX-License-Identifier: BSD-3-Clause */
#include "procfs.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io.h"

static int root = -1;

int proc_open(void)
{
    int old = root;
    root = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return old;
}

int proc_fd(void)
{
    return root;
}

static bool parse_pid(const char **text, pid_t *out)
{
    char *end;
    errno = 0;
    long value = strtol(*text, &end, 10);
    if (end == *text || errno != 0 || value < INT_MIN || value > INT_MAX)
        return false;
    *out = (pid_t)value;
    *text = end;
    return true;
}

bool proc_parse_stat(const char *text, struct proc_stat *out)
{
    memset(out, 0, sizeof(*out));
    /* The name is in brackets and may hold brackets and spaces: its end is the last bracket. */
    const char *open_bracket = strchr(text, '(');
    const char *close_bracket = strrchr(text, ')');
    if (open_bracket == NULL || close_bracket == NULL || close_bracket < open_bracket)
        return false;
    const char *cursor = text;
    if (!parse_pid(&cursor, &out->pid) || out->pid <= 0)
        return false;
    size_t length = (size_t)(close_bracket - open_bracket) - 1;
    if (length >= sizeof(out->comm))
        length = sizeof(out->comm) - 1;
    memcpy(out->comm, open_bracket + 1, length);
    if (close_bracket[1] != ' ' || isalpha((unsigned char)close_bracket[2]) == 0)
        return false;
    out->state = close_bracket[2];
    cursor = close_bracket + 3;
    if (!parse_pid(&cursor, &out->ppid) || !parse_pid(&cursor, &out->pgrp) ||
        !parse_pid(&cursor, &out->session))
        return false;
    /* Fields 7 to 21 are of no interest; 22 is the start time. */
    for (int field = 7; field < 22; field++) {
        while (*cursor == ' ')
            cursor++;
        if (*cursor == '\0')
            return false;
        while (*cursor != ' ' && *cursor != '\0')
            cursor++;
    }
    char *end;
    errno = 0;
    out->starttime = strtoull(cursor, &end, 10);
    return end != cursor && errno == 0;
}

static bool parse_number(const char *text, int base, uint64_t *out)
{
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, base);
    if (end == text || errno != 0)
        return false;
    *out = value;
    return true;
}

static bool parse_uids(const char *text, uid_t uid[4])
{
    for (int i = 0; i < 4; i++) {
        while (*text == '\t' || *text == ' ')
            text++;
        char *end;
        errno = 0;
        unsigned long value = strtoul(text, &end, 10);
        if (end == text || errno != 0 || value > UINT_MAX || isdigit((unsigned char)*text) == 0)
            return false;
        uid[i] = (uid_t)value;
        text = end;
    }
    return true;
}

bool proc_parse_status(const char *text, struct proc_status *out)
{
    memset(out, 0, sizeof(*out));
    bool have_uid = false;
    for (const char *line = text; *line != '\0';) {
        const char *end = strchrnul(line, '\n');
        const char *colon = memchr(line, ':', (size_t)(end - line));
        if (colon != NULL) {
            size_t key = (size_t)(colon - line);
            const char *value = colon + 1;
            uint64_t number;
#define IS(name) (key == sizeof(name) - 1 && memcmp(line, name, key) == 0)
            if (IS("Uid")) {
                have_uid = parse_uids(value, out->uid);
                if (!have_uid)
                    return false;
            } else if (IS("NSpid")) {
                out->nspid_count = 0;
                while (out->nspid_count < PROC_NSPID_MAX) {
                    while (*value == '\t' || *value == ' ')
                        value++;
                    if (value >= end || !parse_pid(&value, &out->nspid[out->nspid_count]))
                        break;
                    out->nspid_count++;
                }
            } else if (IS("RssAnon") && parse_number(value, 10, &number)) {
                out->rss_anon = number * 1024;
            } else if (IS("RssShmem") && parse_number(value, 10, &number)) {
                out->rss_shmem = number * 1024;
            } else if (IS("CapInh")) {
                parse_number(value, 16, &out->cap_inh);
            } else if (IS("CapPrm")) {
                parse_number(value, 16, &out->cap_prm);
            } else if (IS("CapEff")) {
                parse_number(value, 16, &out->cap_eff);
            } else if (IS("CapBnd")) {
                parse_number(value, 16, &out->cap_bnd);
            } else if (IS("CapAmb")) {
                parse_number(value, 16, &out->cap_amb);
            } else if (IS("Seccomp") && parse_number(value, 10, &number)) {
                out->seccomp = (int)(number & 0xff);
            } else if (IS("TracerPid") && parse_number(value, 10, &number)) {
                out->tracer = (pid_t)(number & INT_MAX);
            } else if (IS("NoNewPrivs") && parse_number(value, 10, &number)) {
                out->no_new_privs = number != 0;
            }
#undef IS
        }
        line = *end == '\n' ? end + 1 : end;
    }
    return have_uid;
}

ssize_t proc_parse_pids(const char *text, pid_t *pids, size_t capacity)
{
    size_t count = 0;
    for (;;) {
        while (isspace((unsigned char)*text) != 0)
            text++;
        if (*text == '\0')
            return (ssize_t)count;
        pid_t pid;
        if (count == capacity || isdigit((unsigned char)*text) == 0 || !parse_pid(&text, &pid) ||
            pid <= 0)
            return -1;
        if (*text != '\0' && isspace((unsigned char)*text) == 0)
            return -1;
        pids[count++] = pid;
    }
}

bool proc_stat(pid_t pid, struct proc_stat *out)
{
    char name[64];
    char text[2048];
    snprintf(name, sizeof(name), "%d/stat", pid);
    return io_read_file_at(root, name, text, sizeof(text)) > 0 && proc_parse_stat(text, out);
}

bool proc_status(pid_t pid, struct proc_status *out)
{
    char name[64];
    char text[16384];
    snprintf(name, sizeof(name), "%d/status", pid);
    return io_read_file_at(root, name, text, sizeof(text)) > 0 && proc_parse_status(text, out);
}

bool proc_comm(pid_t pid, char *buffer, size_t capacity)
{
    char name[64];
    snprintf(name, sizeof(name), "%d/comm", pid);
    ssize_t n = io_read_file_at(root, name, buffer, capacity);
    if (n <= 0)
        return false;
    buffer[strcspn(buffer, "\n")] = '\0';
    return true;
}

bool proc_exists(pid_t pid)
{
    char name[32];
    snprintf(name, sizeof(name), "%d", pid);
    return faccessat(root, name, F_OK, 0) == 0;
}

DIR *proc_dir(pid_t pid, const char *name)
{
    char path[64];
    snprintf(path, sizeof(path), "%d/%s", pid, name);
    return io_open_dir(root, path);
}

ssize_t proc_children_at(int proc, const char *process, pid_t *pids, size_t capacity)
{
    char name[96];
    snprintf(name, sizeof(name), "%s/task", process);
    DIR *dir = io_open_dir(proc, name);
    if (dir == NULL)
        return -1;
    const size_t limit = (size_t)1024 * 1024; /* bytes of one children file */
    ssize_t count = 0;
    for (const struct dirent *entry; count >= 0 && (entry = readdir(dir)) != NULL;) {
        if (isdigit((unsigned char)entry->d_name[0]) == 0)
            continue;
        char children[288];
        snprintf(children, sizeof(children), "%s/children", entry->d_name);
        int file = openat(dirfd(dir), children, O_RDONLY | O_CLOEXEC);
        if (file < 0) {
            if (errno == ENOENT && faccessat(dirfd(dir), entry->d_name, F_OK, 0) != 0)
                continue; /* the thread ended meanwhile */
            count = -1;
            break;
        }
        size_t length;
        char *text = io_read_to_end(file, limit, &length);
        int error = errno;
        io_close(&file);
        if (text == NULL) {
            if (error != ESRCH)
                count = -1;
            continue;
        }
        ssize_t more = proc_parse_pids(text, pids + count, capacity - (size_t)count);
        free(text);
        count = more < 0 ? -1 : count + more;
    }
    closedir(dir);
    return count;
}

ino_t proc_namespace(pid_t pid, const char *name)
{
    char path[64];
    struct stat info;
    if (pid == 0)
        snprintf(path, sizeof(path), "self/ns/%s", name);
    else
        snprintf(path, sizeof(path), "%d/ns/%s", pid, name);
    return fstatat(root, path, &info, 0) == 0 ? info.st_ino : 0;
}

long proc_sysctl(const char *path, long fallback)
{
    char text[64];
    uint64_t value;
    if (io_read_file_at(root, path, text, sizeof(text)) <= 0 || !parse_number(text, 10, &value))
        return fallback;
    return value > LONG_MAX ? fallback : (long)value;
}
