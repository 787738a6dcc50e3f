/* SPDX-License-Identifier: BSD-3-Clause */
/* What /proc says about a process. The parsers take text, so that tests can feed them anything. */
#ifndef KC_PROCFS_H
#define KC_PROCFS_H

#include <dirent.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct proc_stat {
    pid_t pid, ppid, pgrp, session;
    char state;
    unsigned long long starttime; /* clock ticks since boot; with the pid it names one process */
    char comm[64];
};

enum { PROC_NSPID_MAX = 32 };

struct proc_status {
    uid_t uid[4];
    pid_t nspid[PROC_NSPID_MAX]; /* outermost first */
    unsigned nspid_count;
    uint64_t rss_anon, rss_shmem; /* bytes */
    uint64_t cap_inh, cap_prm, cap_eff, cap_bnd, cap_amb;
    pid_t tracer; /* 0: none */
    int seccomp;
    bool no_new_privs;
};

bool proc_parse_stat(const char *text, struct proc_stat *out);
bool proc_parse_status(const char *text, struct proc_status *out);
/* Decimal numbers separated by white space. Returns how many were stored, or -1 on anything else. */
ssize_t proc_parse_pids(const char *text, pid_t *pids, size_t capacity);

/* The /proc that all of the following read. proc_open() may be called again after another /proc was
 * mounted; the old directory fd is returned (or -1) and is then the caller's. */
int proc_open(void);
int proc_fd(void);

bool proc_stat(pid_t pid, struct proc_stat *out);
bool proc_status(pid_t pid, struct proc_status *out);
bool proc_comm(pid_t pid, char *buffer, size_t capacity);
bool proc_exists(pid_t pid);
/* /proc/PID/NAME, a directory; NULL when it cannot be read. */
DIR *proc_dir(pid_t pid, const char *name);
/* Children of all threads of a process, as the /proc behind `proc` numbers them. */
ssize_t proc_children_at(int proc, const char *process, pid_t *pids, size_t capacity);
/* Inode of /proc/PID/ns/NAME, 0 when it cannot be read. PID 0 is the caller. */
ino_t proc_namespace(pid_t pid, const char *name);
long proc_sysctl(const char *path, long fallback);

#endif
