//! Bytes through a proxy's tunnel beside the same bytes by a direct connection, both over this machine's loopback interface.

#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::net::{SocketAddr, TcpListener as StdListener};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use prorl_sandbox::egress::{Egress, EgressConfig, Gate, Rules};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

/// What one transfer reads.
const BYTES: usize = 64 << 20;

/// What is read or written at once.
const PIECE: usize = 256 << 10;

/// The head of the answer to a request for a tunnel, of which only the length matters: it has a date.
const ANSWER_END: &[u8] = b"\r\n\r\n";

/// Serves zeroes without end.
async fn serve(listener: TcpListener) {
    let mut open = JoinSet::new();
    while let Ok((mut stream, _)) = listener.accept().await {
        open.spawn(async move {
            let zeroes = vec![0; PIECE];
            while stream.write_all(&zeroes).await.is_ok() {}
        });
    }
}

async fn read(mut stream: TcpStream) {
    let (mut piece, mut n_read) = (vec![0; PIECE], 0);
    while n_read < BYTES {
        n_read += stream.read(&mut piece).await.expect("it goes on without end");
    }
}

async fn tunnel(proxy: SocketAddr, to: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(proxy).await.expect("it listens");
    stream.write_all(format!("CONNECT {to} HTTP/1.1\r\n\r\n").as_bytes()).await.expect("it listens");
    let mut head = Vec::new();
    while !head.ends_with(ANSWER_END) {
        head.push(stream.read_u8().await.expect("it answers"));
    }
    assert!(head.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&head));
    stream
}

fn tunnels(criterion: &mut Criterion) {
    let tokio = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("threads can be started");
    let _entered = tokio.enter();
    let listen = || StdListener::bind("127.0.0.1:0").expect("there are ports");
    let (server, proxy) = (listen(), listen());
    let [to, at] = [&server, &proxy].map(|listener| listener.local_addr().expect("it is bound"));
    server.set_nonblocking(true).expect("it is a socket");
    let mut serving = JoinSet::new();
    serving.spawn(serve(TcpListener::from_std(server).expect("it is a socket")));
    // An operator's own service: no other address of this machine is ever connected to.
    let rules = Rules::parse([to.to_string()]).expect("an address is an entry");
    let config = EgressConfig { private: rules.clone(), ..EgressConfig::default() };
    let _egress = Egress::serve(proxy, Gate::new(Some(rules)), config).expect("it is a socket");

    let mut group = criterion.benchmark_group("egress");
    group.sample_size(20).throughput(Throughput::Bytes(BYTES as u64));
    group.bench_function("direct", |bencher| {
        bencher.iter(|| tokio.block_on(async { read(TcpStream::connect(to).await.expect("it listens")).await }));
    });
    group.bench_function("tunnel", |bencher| {
        bencher.iter(|| tokio.block_on(async { read(tunnel(at, to).await).await }));
    });
    group.finish();
}

criterion_group!(benches, tunnels);
criterion_main!(benches);
