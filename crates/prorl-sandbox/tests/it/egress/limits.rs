//! What a connection may hold, and for how long.

use std::{io, net::IpAddr, sync::Arc, time::Duration};

use async_trait::async_trait;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use parking_lot::Mutex;
use prorl_sandbox::egress::{EgressConfig, Place, Resolver};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::Semaphore,
    task::JoinSet,
    time::{Instant, timeout},
};

use super::support::{Echo, Names, Proxy, Web, config, is_in_own_network};
use crate::support::{LONG, skip};

const SHORT: Duration = Duration::from_millis(500);

#[tokio::test]
async fn who_says_nothing_or_says_it_slowly_is_hung_up_on() {
    if !is_in_own_network("egress::limits::who_says_nothing_or_says_it_slowly_is_hung_up_on") {
        return;
    }
    let names = Names::new(&[("web.example", &["203.0.113.1"])]);
    let mut echo = Echo::start("203.0.113.1:443").await;
    let _web = Web::saying("203.0.113.1:80", "web").await;
    let slow_head = EgressConfig { header_timeout: SHORT, ..config(&names) };
    let proxy = Proxy::start(&["web.example"], slow_head);
    // Nothing at all, half a head, a byte now and then, and nothing after a first request.
    let mut silent = proxy.talk().await;
    let mut half = proxy.talk().await;
    half.say("GET http://web.example/ HTTP/1.1\r\nHost:").await;
    let mut second = proxy.talk().await;
    second.say("GET http://web.example/ HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert!(second.answer().await.ends_with("web"));
    let mut drip = TcpStream::connect(proxy.address).await.unwrap();
    drip.write_all(b"GET http://web.example/ HTTP/1.1\r\n").await.unwrap();
    let dripped = timeout(LONG, async { while drip.write_all(b"X-A: b\r\n").await.is_ok() {} });
    dripped.await.expect("it hangs up in the middle of an endless head");
    for talk in [&mut silent, &mut half, &mut second] {
        let rest = talk.rest().await;
        assert!(rest.is_empty() || rest.starts_with("HTTP/1.1 408 "), "{rest}");
    }
    let mut large = proxy.talk().await;
    large.say(&format!("GET http://web.example/ HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(70 << 10))).await;
    // What it has not read can cost the answer.
    let answer = large.rest().await;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431 "), "{answer}");
    proxy.egress.end().await;

    let silence = EgressConfig { idle_timeout: SHORT, ..config(&names) };
    let proxy = Proxy::start(&["web.example"], silence);
    let mut tunnel = proxy.talk().await;
    tunnel.say("CONNECT web.example:443 HTTP/1.1\r\n\r\nhello").await;
    assert!(tunnel.answer().await.starts_with("HTTP/1.1 200 "));
    assert_eq!(tunnel.rest().await, "hello");
    echo.has_ended().await;
    // A tunnel in which something passes goes on for longer than that.
    let mut tunnel = proxy.talk().await;
    tunnel.say("CONNECT web.example:443 HTTP/1.1\r\n\r\n").await;
    assert!(tunnel.answer().await.starts_with("HTTP/1.1 200 "));
    let begun = Instant::now();
    while begun.elapsed() < SHORT * 4 {
        tunnel.say("tick").await;
        tunnel.hears("tick").await;
    }
    // A body that never comes.
    let stalled = "POST http://web.example/ HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf";
    let answer = proxy.ask(stalled).await;
    assert!(answer.starts_with("HTTP/1.1 504 "), "{answer}");
    // One side of it may end before the other.
    tunnel.0.get_mut().shutdown().await.unwrap();
    assert_eq!(tunnel.rest().await, "");
    echo.has_ended().await;
    proxy.egress.end().await;
}

#[tokio::test]
async fn a_server_that_does_not_answer_is_given_up() {
    if !is_in_own_network("egress::limits::a_server_that_does_not_answer_is_given_up") {
        return;
    }
    let names = Names::new(&[("mute.example", &["203.0.113.1"]), ("shut.example", &["203.0.113.2,203.0.113.1"])]);
    // One that accepts and says nothing.
    let _mute = std::net::TcpListener::bind("203.0.113.1:80").unwrap();
    let config = EgressConfig { idle_timeout: SHORT, ..config(&names) };
    let proxy = Proxy::start(&["mute.example", "shut.example", "shut.example:81"], config);
    let answer = proxy.ask("GET http://mute.example/ HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert!(
        answer.starts_with("HTTP/1.1 504 ") && answer.contains("mute.example:80 did not answer within 500ms"),
        "{answer}"
    );
    let answer = proxy.ask("CONNECT shut.example:81 HTTP/1.1\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 502 ") && answer.contains("Connection refused"), "{answer}");
    // Where one address refuses, the next is tried.
    let answer = proxy.ask("CONNECT shut.example:80 HTTP/1.1\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    proxy.egress.end().await;
}

/// A resolver with few threads, one of whose name servers is silent.
#[derive(Debug)]
struct Silent {
    threads: Semaphore,
    /// What its threads hold, which nobody ends.
    held: Mutex<Vec<Place>>,
}

#[async_trait]
impl Resolver for Silent {
    async fn resolve(&self, name: &str, place: &Place) -> io::Result<Vec<IpAddr>> {
        let thread = self.threads.acquire().await.unwrap();
        if name == "silent.example" {
            thread.forget();
            self.held.lock().push(place.clone());
            std::future::pending::<()>().await;
        }
        Ok(vec![IpAddr::from([203, 0, 113, 1])])
    }
}

#[tokio::test]
async fn a_silent_name_server_holds_up_its_own_sandbox_alone() {
    if !is_in_own_network("egress::limits::a_silent_name_server_holds_up_its_own_sandbox_alone") {
        return;
    }
    let _web = Web::saying("203.0.113.1:80", "web").await;
    let silent = Arc::new(Silent { threads: Semaphore::new(4), held: Mutex::default() });
    let config = EgressConfig { resolver: Arc::clone(&silent) as Arc<dyn Resolver>, ..EgressConfig::default() };
    let patient = Proxy::start(&["web.example"], config.clone());
    let hasty = EgressConfig { max_opening: 2, connect_timeout: SHORT, ..config };
    let proxy = Proxy::start(&["silent.example", "web.example", "203.0.113.1"], hasty);
    let get = |host: &str| format!("GET http://{host}/ HTTP/1.1\r\nHost: x\r\n\r\n");
    let mut asking = Vec::new();
    for _ in 0..8 {
        let mut talk = proxy.talk().await;
        talk.say(&get("silent.example")).await;
        asking.push(talk);
    }
    let mut answers = Vec::new();
    for talk in &mut asking {
        answers.push(talk.answer().await);
    }
    assert_eq!(silent.held.lock().len(), 2);
    let slow = answers.iter().filter(|answer| answer.starts_with("HTTP/1.1 504 ")).count();
    let busy = "HTTP/1.1 503 egress busy: silent.example:80 waited 500ms for one of 2 places";
    let refused = answers.iter().filter(|answer| answer.starts_with(busy)).count();
    assert_eq!((slow, refused), (2, 6), "{answers:?}");
    // Its questions are still open, so it can ask nothing else, and others can.
    for host in ["web.example", "203.0.113.1"] {
        assert!(proxy.ask(&get(host)).await.starts_with("HTTP/1.1 503 egress busy: "));
    }
    assert!(patient.ask(&get("web.example")).await.ends_with("web"));
    // Who waits gets a place that is free in time.
    let mut waiting = proxy.talk().await;
    waiting.say(&get("web.example")).await;
    silent.held.lock().clear();
    assert!(waiting.answer().await.ends_with("web"));
    proxy.egress.end().await;
    patient.egress.end().await;
}

#[tokio::test]
async fn a_thousand_connections_wait_their_turn() {
    const ME: &str = "egress::limits::a_thousand_connections_wait_their_turn";
    if !is_in_own_network(ME) {
        return;
    }
    // Both ends of each are this process's.
    let (_, most_files) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, most_files, most_files).unwrap();
    if most_files < 4096 {
        return skip(ME, "this user may not open 4096 files");
    }
    let names = Names::new(&[("web.example", &["203.0.113.1"])]);
    let _web = Web::saying("203.0.113.1:80", "web").await;
    let proxy = Proxy::start(&["web.example"], EgressConfig { max_connections: 8, ..config(&names) });
    let mut silent = Vec::new();
    for _ in 0..8 {
        silent.push(proxy.talk().await);
    }
    let mut ninth = proxy.talk().await;
    ninth.say("GET http://web.example/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
    timeout(SHORT, ninth.answer()).await.expect_err("it has to wait");
    drop(silent.pop());
    assert!(ninth.answer().await.ends_with("web"));
    drop(silent);
    let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = files();
    let mut asking = JoinSet::new();
    for _ in 0..1000 {
        let address = proxy.address;
        asking.spawn(async move {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let request = b"GET http://web.example/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
            stream.write_all(request).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            assert!(answer.ends_with("web"), "{answer}");
        });
    }
    let all = async {
        while let Some(done) = asking.join_next().await {
            done.unwrap();
        }
    };
    timeout(LONG * 3, all).await.unwrap();
    assert!(files() <= before + 8 * 3, "{before} files, then {}", files());
    proxy.egress.end().await;
}
