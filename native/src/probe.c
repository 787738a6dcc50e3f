/* SPDX-License-Identifier: BSD-3-Clause */
#include "probe.h"

#include <linux/capability.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "caps.h"
#include "config.h"
#include "criu.h"
#include "cuda.h"
#include "json.h"
#include "pidns.h"
#include "procfs.h"

#ifndef CAP_CHECKPOINT_RESTORE
#define CAP_CHECKPOINT_RESTORE 40
#endif

static struct json json;
static unsigned problems;

static void remark(const char *reason, const char *message, const char *hint)
{
    json_open(&json, NULL, '{');
    json_string(&json, "reason", reason);
    json_string(&json, "message", message);
    json_string(&json, "hint", hint);
    json_close(&json);
}

static void problem(bool when, const char *reason, const char *message, const char *hint)
{
    if (!when)
        return;
    problems++;
    remark(reason, message, hint);
}

/* The command that gives this very program the rights it needs. */
static void setcap_hint(char *hint, size_t size)
{
    char program[1024];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (length <= 0 || (size_t)length == sizeof program - 1) {
        static const char name[] = "kernel-capture";
        memcpy(program, name, sizeof name);
    } else {
        program[length] = '\0';
    }
    snprintf(hint, size,
             "Ask the administrator to run: setcap cap_checkpoint_restore,cap_net_admin,"
             "cap_setpcap=p '%s'",
             program);
}

int probe_command(void)
{
    char rights[1200];
    struct criu criu;
    struct kc_result result = {0};
    struct kc_result gpu_result = {0};
    bool gpu;
    struct proc_status self = {0};
    struct utsname system = {0};
    bool found = criu_find(&criu, &result);
    bool admin = caps_permitted(CAP_SYS_ADMIN);
    bool checkpoint = caps_permitted(CAP_CHECKPOINT_RESTORE) || admin;
    bool network = caps_permitted(CAP_NET_ADMIN);
    bool bounding = caps_permitted(CAP_SETPCAP);
    bool namespaces = pidns_possible();
    uname(&system);
    setcap_hint(rights, sizeof rights);
    proc_status(getpid(), &self);
    json_begin(&json, "probe");
    json_string(&json, "version", KC_VERSION);
    json_string(&json, "kernel", system.release);
    if (found) {
        json_open(&json, "criu", '{');
        json_string(&json, "path", criu.path);
        json_string(&json, "version", criu.version);
        json_close(&json);
    } else {
        json_null(&json, "criu");
    }
    json_open(&json, "capabilities", '{');
    json_bool(&json, "checkpoint_restore", caps_permitted(CAP_CHECKPOINT_RESTORE));
    json_bool(&json, "net_admin", network);
    json_bool(&json, "setpcap", bounding);
    json_bool(&json, "sys_ptrace", caps_permitted(CAP_SYS_PTRACE));
    json_bool(&json, "sys_admin", admin);
    json_close(&json);
    gpu = cuda_probe(&json, &gpu_result);
    json_bool(&json, "no_new_privs", self.no_new_privs);
    json_int(&json, "seccomp", self.seccomp);
    json_int(&json, "uid", getuid());
    json_bool(&json, "root", caps_root());
    json_open(&json, "problems", '[');
    problem(!found, "no_criu", result.message,
            "Install CRIU 4.2 or newer, for example with the project's set-up.");
    problem(!checkpoint, "no_capability", "The right to capture processes is missing.", rights);
    problem(checkpoint && !network, "no_capability",
            "The right to capture network connections (NET_ADMIN) is missing.",
            "Ask the administrator for the capability NET_ADMIN.");
    problem(checkpoint && !bounding, "no_capability",
            "The right to restore capability sets (SETPCAP) is missing.",
            "Ask the administrator for the capability SETPCAP.");
    problem(caps_yama_forbids(), "no_capability",
            "This node lets processes be traced by their ancestors only "
            "(kernel.yama.ptrace_scope).",
            "Ask the administrator for kernel.yama.ptrace_scope = 0, or to add cap_sys_ptrace to the "
            "capabilities of kernel-capture.");
    /* The kernel lets no process suspend filters that is under one itself, whatever its rights. */
    problem(self.seccomp == 2, "no_capability",
            "Processes here run under a seccomp filter, and under one nobody can be captured.",
            "Ask the administrator to run the container with seccomp unconfined.");
    json_close(&json);
    json_open(&json, "notes", '[');
    if (self.no_new_privs && !caps_root() && !checkpoint)
        remark("no_new_privs", "File capabilities have no effect here (no_new_privs is set).",
               "Allow privilege escalation in the container's security settings.");
    if (!gpu)
        remark(kc_reason_name(gpu_result.reason), gpu_result.message,
               "Kernels that use the GPU cannot be saved here; others can.");
    if (!caps_root())
        remark("clock", "After a move to another node the monotonic clock may jump.", NULL);
    if (!namespaces)
        remark("pid_namespace",
               "A state whose process numbers are in use cannot be restored on this node.", NULL);
    json_close(&json);
    json_bool(&json, "can_capture", problems == 0);
    json_bool(&json, "can_set_pid", checkpoint);
    json_bool(&json, "pid_namespaces", namespaces);
    json_bool(&json, "time_namespaces", caps_root() && admin && proc_namespace(0, "time") != 0);
    json_send(&json, 5000);
    return 0;
}
