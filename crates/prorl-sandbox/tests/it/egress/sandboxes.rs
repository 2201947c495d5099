//! The same from inside of sandboxes.

use prorl_sandbox::{
    Runtime, SandboxSpec,
    egress::{Egress, EgressConfig, Gate, Rules},
};

use super::support::{Echo, Names, Web, config, is_in_own_network};
use crate::{
    contract::Ground,
    support::{Live, runtime, spec},
};

const PORT: u16 = 3128;

/// A sandbox with a way out.
pub(super) struct Let {
    pub(super) live: Live,
    pub(super) gate: Gate,
    pub(super) egress: Egress,
}

impl Let {
    pub(super) async fn start(spec: SandboxSpec, rules: &[&str], config: EgressConfig) -> Self {
        Self::start_on(&runtime(), spec, rules, config).await
    }

    async fn start_on(runtime: &dyn Runtime, spec: SandboxSpec, rules: &[&str], config: EgressConfig) -> Self {
        let mut live = Live::start_on(runtime, &SandboxSpec { proxy_port: Some(PORT), ..spec }).await;
        let gate = Gate::new(Some(Rules::parse(rules).unwrap()));
        let egress = Egress::serve(live.sandbox.take_proxy().unwrap(), gate.clone(), config).unwrap();
        assert!(live.sandbox.take_proxy().is_none());
        Self { live, gate, egress }
    }

    /// Says one request to the proxy from inside, and returns what comes back until its end.
    async fn ask(&self, request: &str) -> String {
        let script = format!("exec bash -c 'exec 3<>/dev/tcp/127.0.0.1/{PORT} && printf \"{request}\" >&3 && cat <&3'");
        self.live.sh(&script).await
    }

    pub(super) async fn shut(self) {
        self.egress.end().await;
        self.live.shut().await;
    }
}

#[tokio::test]
async fn a_sandbox_reaches_what_is_named_and_nothing_else() {
    if !is_in_own_network("egress::sandboxes::a_sandbox_reaches_what_is_named_and_nothing_else") {
        return;
    }
    let names = Names::new(&[("web.example", &["203.0.113.1"])]);
    let web = Web::saying("203.0.113.1:80", "hello").await;
    let mut spec = spec();
    spec.env = vec![("NO_PROXY".to_owned(), "mine".to_owned())];
    let inside = Let::start(spec, &["web.example"], config(&names)).await;
    let seen = inside.live.sh("env | grep -i _proxy | sort").await;
    let proxy = "http://127.0.0.1:3128";
    let expected = format!(
        "HTTPS_PROXY={proxy}\nHTTP_PROXY={proxy}\nNO_PROXY=mine\nhttp_proxy={proxy}\nhttps_proxy={proxy}\nno_proxy=localhost,127.0.0.1,::1"
    );
    assert_eq!(seen, expected);
    let close = "HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n";
    let answer = inside.ask(&format!("GET http://web.example/ {close}")).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with("hello"), "{answer}");
    let answer = inside.ask(&format!("CONNECT other.example:443 {close}")).await;
    assert!(answer.starts_with("HTTP/1.1 403 egress refused: other.example:443 is not among"), "{answer}");
    // There is no other way: no route, no name server.
    for direct in ["/dev/tcp/203.0.113.1/80", "/dev/tcp/web.example/80", "/dev/udp/203.0.113.1/53"] {
        let tried = inside.live.sh(&format!("bash -c 'echo x > {direct}' && echo reached")).await;
        assert!(!tried.contains("reached"), "{tried}");
    }
    assert_eq!(inside.live.sh("cat /proc/net/route | wc -l; cat /proc/net/dev | tail -n +3 | wc -l").await, "1\n1");
    // Nobody but this sandbox sees its proxy: it is at a loopback of its own.
    assert!(std::net::TcpStream::connect(("127.0.0.1", PORT)).is_err());
    let other = Live::start(&self::spec()).await;
    assert!(other.sh(&format!("bash -c '</dev/tcp/127.0.0.1/{PORT}' && echo open")).await.contains("refused"));
    assert_eq!(other.sh("env | grep -ic proxy").await, "0");
    other.shut().await;
    assert_eq!(web.take().len(), 1);
    inside.shut().await;
}

#[tokio::test]
async fn it_is_the_same_in_an_image_of_apptainers() {
    const ME: &str = "egress::sandboxes::it_is_the_same_in_an_image_of_apptainers";
    if !is_in_own_network(ME) {
        return;
    }
    let Some(ground) = Ground::singularity(ME) else { return };
    let names = Names::new(&[("web.example", &["203.0.113.1"])]);
    let _web = Web::saying("203.0.113.1:80", "hello").await;
    let inside = Let::start_on(&*ground.runtime, ground.spec(), &["web.example"], config(&names)).await;
    let variables = inside.live.sh("env").await;
    assert!(variables.lines().any(|line| line == "https_proxy=http://127.0.0.1:3128"), "{variables}");
    for (host, expected) in [("web.example", "hello"), ("other.example", "not among the allowed hosts: web.example")] {
        let request = format!("GET http://{host}/ HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n");
        let answer = inside.ask(&request).await;
        assert!(answer.ends_with(expected), "{answer}");
    }
    let tried = inside.live.sh("bash -c 'echo x > /dev/tcp/203.0.113.1/80' && echo reached").await;
    assert!(!tried.contains("reached"), "{tried}");
    inside.shut().await;
}

#[tokio::test]
async fn a_tunnel_ends_with_its_sandbox_its_proxy_and_its_list() {
    if !is_in_own_network("egress::sandboxes::a_tunnel_ends_with_its_sandbox_its_proxy_and_its_list") {
        return;
    }
    let names = Names::new(&[("echo.example", &["203.0.113.1"])]);
    let mut echo = Echo::start("203.0.113.1:443").await;
    let script = format!(
        "exec bash -c 'exec 3<>/dev/tcp/127.0.0.1/{PORT}
        printf \"CONNECT echo.example:443 HTTP/1.1\\r\\n\\r\\nhello\\n\" >&3
        while read -r line <&3; do echo \"$line\"; [ \"$line\" != hello ] || : > /tmp/stands; done; echo ended'"
    );
    // The list, the proxy, the sandbox.
    for ending in 0..3 {
        let Let { live, gate, egress } = Let::start(spec(), &["echo.example"], config(&names)).await;
        let stands = live.sh("until [ -e /tmp/stands ]; do sleep 0.01; done; echo stands");
        let mut tunnel = Box::pin(live.sh(&script));
        tokio::select! {
            said = stands => assert_eq!(said, "stands"),
            said = &mut tunnel => panic!("{said}"),
        }
        let mut egress = Some(egress);
        match ending {
            0 => gate.set(None),
            1 => egress.take().unwrap().end().await,
            _ => {
                live.sandbox.shutdown(std::time::Duration::from_secs(2)).await.unwrap();
                echo.has_ended().await;
                egress.take().unwrap().end().await;
                continue;
            }
        }
        let said = tunnel.await;
        assert!(said.ends_with("hello\nended"), "{said}");
        echo.has_ended().await;
        if let Some(egress) = egress {
            egress.end().await;
        }
        live.shut().await;
    }
}
