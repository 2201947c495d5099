//! What the sandboxes of a job reach, stage by stage.

use std::{io, net::IpAddr, sync::Arc};

use async_trait::async_trait;
use prorl_agents::{EgressPolicy, Environment};
use prorl_core::{FailureClass, Status};
use prorl_pipeline::SubmitError;
use prorl_sandbox::egress::{EgressConfig, Place, Resolver, Rules};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    task::JoinSet,
};

use crate::support::{Rig, bash, finish, no_layers, observed, open_temp, store};

/// Every name is this machine, as an operator's mirror may be.
#[derive(Debug)]
struct Here;

#[async_trait]
impl Resolver for Here {
    async fn resolve(&self, _name: &str, _place: &Place) -> io::Result<Vec<IpAddr>> {
        Ok(vec![IpAddr::from([127, 0, 0, 1])])
    }
}

/// A server that answers every request with the same text, and its port.
async fn server() -> (JoinSet<()>, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut open = JoinSet::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            open.spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    let Ok(byte) = stream.read_u8().await else { return };
                    head.push(byte);
                }
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello").await.unwrap();
            });
        }
    });
    (tasks, port)
}

/// Asks the proxy for a host and says why it is refused.
fn ask_why(host: &str) -> String {
    format!(
        "exec 3<>/dev/tcp/127.0.0.1/${{http_proxy##*:}}; printf 'CONNECT {host} HTTP/1.1\\r\\n\\r\\n' >&3
        read -r _ _ why <&3; exec 3<&-; echo \"$why\""
    )
}

fn with_mirror(env: &mut Environment, port: u16) {
    let private = Rules::parse([format!("127.0.0.1:{port}")]).unwrap();
    let config = EgressConfig { private, resolver: Arc::new(Here), ..EgressConfig::default() };
    env.egress = EgressPolicy { config, ..EgressPolicy::default() };
}

/// Asks the proxy for a host and says what the answer's first line begins with.
fn ask(host: &str, port: u16) -> String {
    format!(
        "exec 3<>/dev/tcp/127.0.0.1/${{http_proxy##*:}}; printf 'GET http://{host}:{port}/ HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n' >&3
        read -r _ code _ <&3; exec 3<&-; echo \"{host} $code\""
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn each_stage_reaches_what_it_may() {
    let (_server, port) = server().await;
    let asked = format!("{}\n{}", ask("init.example", port), ask("run.example", port));
    let temp = open_temp();
    let store = store(temp.path());
    let look = bash(&format!("cat /workspace/init\n{asked}\n{}", ask_why("init.example:22")));
    let rig = Rig::start(&[look, finish()], Some(&store), |env| with_mirror(env, port)).await;
    let allow = |host: &str| json!({"allow": [format!("{host}:{port}")]});
    let network = json!({"init": allow("init.example"), "run": allow("run.example")});
    let fields = json!({"setup": format!("{{ {asked}\n}} > init"), "network": network, "tools": ["bash", "finish"]});
    // By a setup of its own, and by one of its group.
    for group in [None, Some("g")] {
        let result = rig.run(group, &fields).await;
        assert_eq!(result.outcome.status, Status::Completed, "{:?}", result.error);
        let said = &observed(&result)[0];
        let expected = "init.example 200\nrun.example 403\ninit.example 403\nrun.example 200";
        assert!(said.starts_with(expected), "{said}");
        // It says which of the lists is in force.
        let why = format!("init.example:22 is not among the allowed hosts of network.run.allow: run.example:{port}");
        assert!(said.contains(&why), "{said}");
    }
    no_layers(&store).await;
    rig.pipeline.close().await;
    assert_eq!(rig.pipeline.sandboxes().active, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_asks_for_nothing_has_no_way_out() {
    let look = bash("env | grep -ic proxy; (exec 3<>/dev/tcp/127.0.0.1/3128) 2>&1 | grep -o refused");
    let rig = Rig::start(&[look, finish()], None, |_| {}).await;
    for network in [json!("none"), json!(null), json!({"run": "none"})] {
        let result = rig.run(None, &json!({"network": network, "tools": ["bash", "finish"]})).await;
        let said = &observed(&result)[0];
        assert!(said.starts_with("0\nrefused"), "{said}");
    }
    rig.pipeline.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stage_without_a_list_reaches_nothing() {
    let (_server, port) = server().await;
    let look = bash(&format!("{}\n{}", ask("init.example", port), ask_why("init.example:22")));
    let rig = Rig::start(&[look, finish()], None, |env| with_mirror(env, port)).await;
    let network = json!({"init": {"allow": [format!("init.example:{port}")]}});
    let setup = format!("[ \"$({})\" = 'init.example 200' ]", ask("init.example", port));
    let result = rig.run(None, &json!({"network": network, "setup": setup, "tools": ["bash", "finish"]})).await;
    assert_eq!(result.outcome.status, Status::Completed, "{:?}", result.error);
    let said = &observed(&result)[0];
    assert!(
        said.starts_with("init.example 403\negress refused: init.example:22: no host is allowed now by network.run"),
        "{said}"
    );
    // And one whose setup needs what it may not reach fails there.
    let result = rig.run(None, &json!({"network": {"run": network["init"]}, "setup": setup})).await;
    assert_eq!(result.outcome.failure_class, Some(FailureClass::Handler), "{:?}", result.error);
    rig.pipeline.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_setup_left_open_ends_with_its_stage() {
    let (_server, port) = server().await;
    let setup = format!(
        "setsid bash -c 'exec 3<>/dev/tcp/127.0.0.1/3128; printf \"CONNECT both.example:{port} HTTP/1.1\\r\\n\\r\\n\" >&3
        read -r _ code _ <&3; echo $code > stands; cat <&3; echo over > over' < /dev/null > /dev/null 2>&1 &
        until [ -s stands ]; do sleep 0.01; done"
    );
    let look = bash("until [ -s over ]; do sleep 0.01; done; cat stands over");
    let rig = Rig::start(&[look, finish()], None, |env| with_mirror(env, port)).await;
    // Though the next stage may reach the same.
    let network = json!({"allow": [format!("both.example:{port}")]});
    let result = rig.run(None, &json!({"network": network, "setup": setup, "tools": ["bash", "finish"]})).await;
    assert_eq!(result.outcome.status, Status::Completed, "{:?}", result.error);
    assert!(observed(&result)[0].starts_with("200\nover"), "{:?}", observed(&result));
    rig.pipeline.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_allowed_is_refused_when_it_is_submitted() {
    let rig = Rig::start(&[finish()], None, |env| env.egress.config.private = Rules::default()).await;
    let refused =
        |network: &Value| match rig.pipeline.submit(crate::support::request(None, &json!({"network": network}))) {
            Err(SubmitError::InvalidInstance(problem)) => problem.to_string(),
            Err(other) => panic!("{network}: {other}"),
            Ok(_) => panic!("{network} is taken"),
        };
    for (network, expected) in [
        (json!("allow"), "instance.network: \"allow\" needs a list of hosts"),
        (json!({"allow": []}), "instance.network.allow: expected one host or more"),
        (json!({"allow": ["https://a.example"]}), "instance.network.allow: \"https://a.example\": it has a scheme"),
        (json!({"allow": ["192.168.0.0/16"]}), "instance.network.allow: \"192.168.0.0/16\": it is a range"),
        (json!({"run": {"allow": ["127.0.0.1:8006"]}}), "instance.network.run.allow: \"127.0.0.1:8006\": a loopback"),
        (json!({"run": "host"}), "instance.network.run: a sandbox is on the host's network for good or never"),
        (json!("host"), "instance.network: host is refused by this server"),
    ] {
        let problem = refused(&network);
        assert!(problem.starts_with(expected), "{network}: {problem}");
    }
    rig.pipeline.close().await;
}
