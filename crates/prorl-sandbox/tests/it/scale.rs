//! Many at once: a machine's worth of sandboxes, and a burst of starts.

use std::{num::NonZeroUsize, sync::Arc, time::Duration};

use prorl_sandbox::{NamespaceConfig, NamespaceRuntime, Node, NodeConfig, Runtime as _, SandboxSpec, node};
use tokio::{task::JoinSet, time::Instant};

use crate::support::{Live, runtime, skip, spec};

/// Longer than a loaded machine takes for all of them.
const PATIENT: Duration = Duration::from_mins(2);

/// What one sandbox of a test like this needs of this process, and some for other tests.
const FILES_EACH: u64 = 8;

#[tokio::test]
async fn three_hundred_alive_at_once_answer_each() {
    const N_SANDBOXES: usize = 300;
    let limit = node::raise_open_files().unwrap();
    if limit < FILES_EACH * N_SANDBOXES as u64 {
        return skip("three_hundred_alive_at_once_answer_each", "too few open files are allowed to this user");
    }
    let runtime = Arc::new(runtime());
    let spec = Arc::new(SandboxSpec { start_timeout: PATIENT, ..spec() });
    let mut starting = JoinSet::new();
    for _ in 0..N_SANDBOXES {
        let (runtime, spec) = (Arc::clone(&runtime), Arc::clone(&spec));
        starting.spawn(async move { Live::start_on(&*runtime, &spec).await });
    }
    let alive = starting.join_all().await;
    let mut asking = JoinSet::new();
    for live in alive {
        asking.spawn(async move {
            let answer = live.sh("echo $$ $((6 * 7))").await;
            assert!(answer.ends_with(" 42"), "{answer}");
            live
        });
    }
    let answered = asking.join_all().await;
    assert_eq!(answered.len(), N_SANDBOXES);
    let mut namespaces: Vec<_> = answered.iter().map(|live| live.sandbox.facts().hello.pid_namespace).collect();
    namespaces.sort_unstable();
    namespaces.dedup();
    assert_eq!(namespaces.len(), N_SANDBOXES, "each has a world of its own");
    let mut ending = JoinSet::new();
    for live in answered {
        ending.spawn(live.shut());
    }
    ending.join_all().await;
}

#[tokio::test]
async fn no_more_start_at_once_than_the_node_admits() {
    const MAX_STARTING: usize = 3;
    let config = NodeConfig { max_starting: NonZeroUsize::new(MAX_STARTING).unwrap(), ..NodeConfig::new(spec().guest) };
    let node = Node::open(config).unwrap();
    let runtime = Arc::new(NamespaceRuntime::new(node, NamespaceConfig::default()));
    let begun = Instant::now();
    let mut starting = JoinSet::new();
    for _ in 0..60 {
        let runtime = Arc::clone(&runtime);
        starting.spawn(async move { runtime.start(&SandboxSpec { start_timeout: PATIENT, ..spec() }).await.unwrap() });
    }
    let sandboxes = starting.join_all().await;
    // So many starts side by side can take no more time than that, in sum.
    let taken: Duration = sandboxes.iter().map(|sandbox| sandbox.facts().start_time).sum();
    let room = begun.elapsed() * u32::try_from(MAX_STARTING).unwrap();
    assert!(taken <= room, "starts took {taken:?}, and there was room for {room:?}");
    for sandbox in &sandboxes {
        sandbox.shutdown(PATIENT).await.unwrap();
    }
}
