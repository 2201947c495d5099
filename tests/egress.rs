//! What an operator and a person at the command line say of the hosts that a sandbox may reach.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::{
    process::{Output, Stdio},
    time::Duration,
};

use support::{Serve, math, prorl};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    process::Command,
    task::JoinSet,
    time::timeout,
};

/// More than anything here takes.
const LONG: Duration = Duration::from_secs(30);

async fn run(args: &[&str], env: &[(&str, &str)]) -> Output {
    let mut command = Command::new(prorl());
    command.args(args).stdin(Stdio::null()).kill_on_drop(true);
    command.env_remove("PRORL_EGRESS_PRIVATE").env_remove("PRORL_EGRESS_PROXY").env_remove("PRORL_EGRESS");
    // Nothing here needs a store, and none is to be made in somebody's home.
    command.env("PRORL_STORE", "/dev/null/store").envs(env.iter().copied());
    timeout(LONG, command.output()).await.expect("it ends").unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[tokio::test]
async fn what_no_operator_can_open_is_refused_at_start() {
    let never = |entry: &str, what: &str| format!("egress_private: \"{entry}\": {what}, which nothing opens");
    let metadata = "a metadata service";
    let unused = |key: &str| format!("{key} is given and egress is false, so that nothing would use it");
    for (args, said) in [
        (&["--egress-private", "169.254.169.254"][..], never("169.254.169.254", metadata)),
        (&["--egress-private", "a.example,[fd00:ec2::254]:80"], never("[fd00:ec2::254]:80", metadata)),
        (&["--egress-private", "100.100.100.200"], never("100.100.100.200", metadata)),
        (&["--egress-private", "192.0.0.192"], never("192.0.0.192", metadata)),
        (&["--egress-private", "168.63.129.16"], never("168.63.129.16", metadata)),
        (&["--egress-private", "metadata.google.internal"], never("metadata.google.internal", metadata)),
        (&["--egress-private", "169.254.3.4:8080"], never("169.254.3.4:8080", "a link-local address")),
        (&["--egress-private", "[fe80::1]"], never("[fe80::1]", "a link-local address")),
        (&["--egress-private", "10.0.0.0/8"], "egress_private: \"10.0.0.0/8\": it is a range".to_owned()),
        (&["--egress", "false", "--egress-private", "mirror.example"], unused("egress_private")),
        (&["--egress=false", "--egress-proxy", "proxy.example:3128"], unused("egress_proxy")),
        (&["--egress-proxy", "proxy.example"], "egress_proxy: \"proxy.example\": no HTTP proxy".to_owned()),
        (&["--egress-proxy", "u:s3cret@proxy.example"], "egress_proxy: \"proxy.example\": no HTTP proxy".to_owned()),
        (&["--egress-proxy", "https://u:s3cret@proxy.example:1"], "a scheme other than http://".to_owned()),
    ] {
        let out = run(&[&["serve", "--print-config"], args].concat(), &[]).await;
        let stderr = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(stderr.contains(&said) && !stderr.contains("s3cret"), "{args:?}: {stderr}");
    }
    let fine = ["serve", "--print-config", "--egress-private", "mirror.example,127.0.0.1:3141,localhost:8080"];
    assert!(run(&fine, &[]).await.status.success());
    assert!(run(&["serve", "--print-config", "--egress", "false"], &[]).await.status.success());
}

#[tokio::test]
async fn a_proxys_password_is_not_shown() {
    let proxy = "http://user:s3cret@proxy.example:3128";
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prorl.toml");
    std::fs::write(
        &file,
        format!("egress = true\negress_private = [\"mirror.example\"]\negress_proxy = \"{proxy}\"\n"),
    )
    .unwrap();
    let of_file = ["--config", file.to_str().unwrap()];
    let variable = [("PRORL_EGRESS_PROXY", proxy)];
    for (args, env, source) in
        [(&of_file[..], &[][..], "file"), (&[], &variable, "environment"), (&["--egress-proxy", proxy], &[], "flag")]
    {
        let out = run(&[&["serve", "--print-config"], args].concat(), env).await;
        let stdout = text(&out.stdout);
        let line = format!("egress_proxy = \"[redacted]@proxy.example:3128\" # {source}");
        assert!(stdout.contains(&line) && !stdout.contains("s3cret"), "{stdout}{}", text(&out.stderr));
    }
    for command in [&["serve", "--help"][..], &["sandbox", "exec", "--help"]] {
        let out = run(command, &variable).await;
        assert!(out.status.success() && !text(&out.stdout).contains("s3cret"));
    }
}

#[tokio::test]
async fn a_job_is_told_what_it_cannot_list() {
    let serve = Serve::start(&["--egress-private", "localhost:8080", "--wait-for-llm", "0"]).await;
    for (entry, said) in [
        ("localhost:8006", "\"localhost:8006\": a name of this machine itself, which is refused unless the operator"),
        ("127.0.0.1:8080", "\"127.0.0.1:8080\": a loopback address, which is refused unless the operator"),
        ("metadata.google.internal", "a metadata service, which nothing opens"),
    ] {
        let mut request = math("What is 2+2?", "4");
        request["instance"]["network"] = serde_json::json!({"eval": {"allow": [entry]}});
        let (status, body) = serve.post("/v1/jobs", &request).await;
        assert_eq!((status, body["code"].as_str()), (400, Some("invalid_instance")), "{body}");
        let detail = body["detail"].as_str().unwrap();
        assert!(detail.contains("network.eval.allow") && detail.contains(said), "{detail}");
    }
    serve.stop().await;
}

/// A server that answers with the head of the request that it got, and its port.
async fn mirror() -> (JoinSet<()>, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let Ok(byte) = stream.read_u8().await else { break };
                head.push(byte);
            }
            let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", head.len());
            let _gone = stream.write_all(&[answer.as_bytes(), &head].concat()).await;
        }
    });
    (tasks, port)
}

#[tokio::test]
async fn a_command_reaches_what_is_private_and_by_a_proxy_when_it_is_told_so() {
    let (_mirror, port) = mirror().await;
    let ask = |host: &str| {
        format!(
            "exec 3<>/dev/tcp/127.0.0.1/${{http_proxy##*:}}
            printf 'GET http://{host}/ HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n' >&3; cat <&3"
        )
    };
    let exec = async |args: &[&str], env: &[(&str, &str)], host: &str| {
        let out = run(&[&["sandbox", "exec"], args, &["host", "--", "bash", "-c", &ask(host)]].concat(), env).await;
        assert!(out.status.success(), "{}", text(&out.stderr));
        assert!(!text(&out.stderr).contains("s3cret"));
        text(&out.stdout)
    };
    let here = format!("localhost:{port}");
    let proxy = format!("user:s3cret@127.0.0.1:{port}");
    let said = exec(&["--allow", &here, "--egress-private", &here], &[], &here).await;
    assert!(said.ends_with(&format!("host: {here}\r\n\r\n")), "{said}");
    let said = exec(&["--allow", &here], &[("PRORL_EGRESS_PRIVATE", &format!("a.example,{here}"))], &here).await;
    assert!(said.starts_with("HTTP/1.1 200 "), "{said}");
    for (args, env) in [
        (&["--allow", "web.example", "--egress-proxy", &proxy][..], &[][..]),
        (&["--allow", "web.example"], &[("PRORL_EGRESS_PROXY", proxy.as_str())]),
    ] {
        let said = exec(args, env, "web.example").await;
        assert!(said.contains("GET http://web.example/ HTTP/1.1"), "{said}");
        assert!(said.contains("proxy-authorization: Basic dXNlcjpzM2NyZXQ="), "{said}");
    }
    let said = exec(&["--allow", &here, "--egress-private", &here], &[], "other.example").await;
    assert!(
        said.contains("403 egress refused: other.example:80 is not among the allowed hosts of --allow: "),
        "{said}"
    );

    for (args, env, said) in [
        (&["--egress-private", "a.example"][..], &[][..], "--allow"),
        (&["--egress-proxy", "a.example:1"], &[], "--allow"),
        (&["--allow", "localhost"], &[], "--allow: \"localhost\": a name of this machine itself"),
        (
            &["--allow", "10.0.0.1"],
            &[],
            "--allow: \"10.0.0.1\": a private address, which is refused unless the operator",
        ),
        (
            &["--allow", "a.example", "--egress-private", "169.254.169.254"],
            &[],
            "--egress-private: \"169.254.169.254\"",
        ),
        (&["--allow", "a.example", "--egress-proxy", "u:s3cret@a"], &[], "--egress-proxy: \"a\": no HTTP proxy"),
        (
            &["--allow", "a.example"],
            &[("PRORL_EGRESS_PROXY", "u:s3cret@a")],
            "PRORL_EGRESS_PROXY: \"a\": no HTTP proxy",
        ),
        (&["--allow", "a.example"], &[("PRORL_EGRESS_PRIVATE", "*")], "PRORL_EGRESS_PRIVATE: \"*\": it is every host"),
    ] {
        let out = run(&[&["sandbox", "exec"], args, &["host", "--", "true"]].concat(), env).await;
        let stderr = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(stderr.contains(said) && !stderr.contains("s3cret"), "{args:?}: {stderr}");
    }
    // What is set for a whole machine is no mistake of a command that reaches nothing.
    let set = [("PRORL_EGRESS_PROXY", "proxy.example:1"), ("PRORL_EGRESS_PRIVATE", "a.example")];
    assert!(run(&["sandbox", "exec", "host", "--", "true"], &set).await.status.success());
}
