//! What code of a rollout can reach, as the whole system starts it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use serde_json::json;
use support::{Serve, finish, math, mock, python};

#[tokio::test]
async fn code_in_a_rollout_reaches_nothing_of_the_host() {
    let secret = tempfile::NamedTempFile::new().unwrap();
    let probe = format!(
        r#"
import os, socket
def attempt(what, act):
    try:
        act()
        print("REACHED", what)
    except OSError as err:
        print("refused", what, type(err).__name__)
attempt("core_pattern", lambda: open("/proc/sys/kernel/core_pattern", "w"))
attempt("sysrq", lambda: open("/proc/sysrq-trigger", "w"))
attempt("secret", lambda: open({secret:?}))
attempt("shadow", lambda: open("/etc/shadow"))
def some(folder):
    if not os.listdir(folder):
        raise FileNotFoundError(folder)
attempt("root home", lambda: some("/root"))
attempt("homes", lambda: [n for n in os.listdir("/home") if n != "agent"] or some("/nowhere"))
attempt("var", lambda: some("/var/lib"))
attempt("guest", lambda: open("/proc/1/mem", "rb"))
attempt("guest's files", lambda: os.listdir("/proc/1/fd"))
attempt("network", lambda: socket.create_connection(("192.0.2.1", 80), 1))
attempt("mount", lambda: os.stat("/proc/1/root/etc"))
print("env", sorted(k for k in os.environ if k.startswith(("CARGO", "PRORL", "SSH", "AWS"))))
print("root outside" if open("/proc/self/uid_map").read().split()[1] == "0" else "nobody of note")
print("uid", os.getuid(), "cwd", os.getcwd(), "parents", len([p for p in os.listdir("/proc") if p.isdigit()]) < 10)
open("/workspace/mine", "w").write("x")
print("host-root", os.access("/usr/bin/env", os.W_OK) and os.stat("/usr/bin/env").st_uid == 0)
"#,
        secret = secret.path().to_str().unwrap()
    );
    let mock = mock(&json!({"default": {"turns": [python(&probe), finish("4")]}})).await;
    let serve = Serve::with_mock(&[], &mock).await;
    let (_, result) = serve.post("/process", &math("probe", "4")).await;
    let said = result["messages"][3]["content"].as_str().unwrap();
    assert!(!said.contains("REACHED"), "{said}");
    assert_eq!(said.matches("refused").count(), 11, "{said}");
    assert!(said.contains("nobody of note"), "{said}");
    assert!(said.contains("env []") && said.contains("cwd /workspace") && said.contains("host-root False"), "{said}");
    serve.stop().await;
    mock.shutdown().await.unwrap();
}
