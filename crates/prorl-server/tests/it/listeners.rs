//! Where the server listens, and how it ends.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, net::UnixListener},
    path::Path,
    sync::Arc,
    time::Duration,
};

use prorl_server::{Error, Listen, ServerConfig};
use serde_json::json;
use tokio::{net::TcpStream, sync::Barrier, task::JoinSet};

use crate::support::{Service, answer, job, read_all, refused, small};

async fn on(path: &Path) -> Result<Service, Error> {
    Service::on(Listen::Unix(path.to_owned()), ServerConfig::default(), small()).await
}

fn client(path: &Path) -> reqwest::Client {
    reqwest::Client::builder().no_proxy().unix_socket(path).build().unwrap()
}

#[tokio::test]
async fn a_socket_file_is_for_its_owner_alone_and_goes_with_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("p.sock");
    let service = on(&path).await.unwrap();
    assert_eq!((service.url.clone(), service.addr), (format!("unix:{}", path.display()), None));
    assert_eq!(fs::symlink_metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let body = job("j1", json!({"reward": 1.0}));
    let (status, result) = answer(client(&path).post("http://x/process").json(&body)).await;
    assert_eq!((status, &result["reward"]), (200, &json!(1.0)));
    service.end().await;
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn a_dead_servers_file_is_replaced_and_a_live_ones_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("p.sock");
    drop(UnixListener::bind(&path).unwrap()); // Its file stays.
    let service = on(&path).await.unwrap();

    let second = on(&path).await.err().unwrap();
    assert!(
        matches!(&second, Error::Bind { source, .. } if source.kind() == std::io::ErrorKind::AddrInUse),
        "{second}"
    );
    assert_eq!(answer(client(&path).get("http://x/healthz")).await.0, 200);

    // What others put in its place is not removed with the server.
    fs::remove_file(&path).unwrap();
    fs::write(&path, "mine").unwrap();
    service.end().await;
    assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
    let third = on(&path).await.err().unwrap();
    assert!(
        matches!(&third, Error::Bind { source, .. } if source.kind() == std::io::ErrorKind::AlreadyExists),
        "{third}"
    );
    assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn of_many_starts_on_one_file_one_wins() {
    const N_STARTS: usize = 8;
    let folder = tempfile::tempdir().unwrap();
    for round in 0..20 {
        let path = folder.path().join(format!("{round}.sock"));
        drop(UnixListener::bind(&path).unwrap());
        let together = Arc::new(Barrier::new(N_STARTS));
        let mut starts = JoinSet::new();
        for _ in 0..N_STARTS {
            let (path, together) = (path.clone(), Arc::clone(&together));
            starts.spawn(async move {
                together.wait().await;
                on(&path).await
            });
        }
        let mut won: Vec<_> = starts.join_all().await.into_iter().filter_map(Result::ok).collect();
        assert_eq!(won.len(), 1);
        assert_eq!(answer(client(&path).get("http://x/healthz")).await.0, 200);
        won.remove(0).end().await;
        assert!(!path.exists());
    }
}

#[tokio::test]
async fn an_address_in_use_is_refused() {
    let service = Service::start().await;
    let listen = Listen::Tcp(service.addr.unwrap());
    let refused = Service::on(listen, ServerConfig::default(), small()).await.err().unwrap();
    assert!(matches!(refused, Error::Bind { .. }), "{refused}");
    service.end().await;
}

#[tokio::test]
async fn the_end_of_the_server_answers_those_who_wait_and_closes_every_connection() {
    let config = ServerConfig { stop_grace: Duration::from_hours(1), ..ServerConfig::default() };
    let service = Service::with(config, small()).await;
    let addr = service.addr.unwrap();
    let mut idle = TcpStream::connect(addr).await.unwrap();
    let mut waiting = service.send_raw("/process", &job("j1", json!({"at": "run", "do": "hang"}))).await;
    service.probe.reached().await;
    service.end().await;
    let text = read_all(&mut waiting).await;
    assert!(text.starts_with("HTTP/1.1 200") && text.contains("\"status\":\"cancelled\""), "{text}");
    assert_eq!(read_all(&mut idle).await, "");
    assert!(TcpStream::connect(addr).await.is_err());
}

#[tokio::test]
async fn a_connection_that_will_not_end_is_cut_off() {
    let config = ServerConfig { stop_grace: Duration::from_millis(100), ..ServerConfig::default() };
    let service = Service::with(config, small()).await;
    // A request whose body never comes whole.
    let mut half = service.send_raw("/healthz", &json!(null)).await;
    tokio::io::AsyncWriteExt::write_all(&mut half, b"POST /process HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n")
        .await
        .unwrap();
    while service.get("/healthz").await.0 != 200 {}
    service.end().await;
    let _ = read_all(&mut half).await;
}

#[tokio::test]
async fn http2_is_spoken_with_prior_knowledge() {
    let service = Service::start().await;
    let http = reqwest::Client::builder().no_proxy().http2_prior_knowledge().build().unwrap();
    let response = http.get(format!("{}/status", service.url)).send().await.unwrap();
    assert_eq!(response.version(), reqwest::Version::HTTP_2);
    let call = http.post(format!("{}/process", service.url)).body(vec![b' '; 65 << 20]);
    refused(&answer(call).await, 413, "body_too_large");
    service.end().await;
}
