//! How sandboxes of a node share a machine: its processors, and its room.

use std::{fs, time::Duration};

use prorl_core::FailureClass;
use prorl_sandbox::{
    GroupChoice, Limits, NamespaceConfig, NamespaceRuntime, Node, NodeConfig, Runtime as _, SandboxError,
};

use crate::{
    contract::limits::{own_processors, processors},
    support::{Live, fresh_node, runtime, spec},
};

#[tokio::test]
async fn sandboxes_of_a_node_are_spread_over_its_processors() {
    let mut limited = spec();
    limited.limits.cpus = Some(1.0);
    let node = fresh_node();
    let runtime = NamespaceRuntime::new(node, NamespaceConfig::default());
    let (mut seen, mut lives) = (Vec::new(), Vec::new());
    for _ in 0..own_processors().len().min(4) {
        let live = Live::start_on(&runtime, &limited).await;
        seen.extend(processors(&live).await);
        lives.push(live);
    }
    let n_seen = seen.len();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), n_seen, "each has one of its own: {seen:?}");
    // The processor of the one that ends is the next one's.
    let freed = processors(&lives[0]).await;
    lives.swap_remove(0).shut().await;
    let next = Live::start_on(&runtime, &limited).await;
    assert_eq!(processors(&next).await, freed);
    next.shut().await;
    for live in lives {
        live.shut().await;
    }
}

#[tokio::test]
async fn limits_that_cannot_be_held_start_nothing() {
    let all = [
        Limits { cpus: Some(0.0), ..Limits::NONE },
        Limits { cpus: Some(f64::NAN), ..Limits::NONE },
        Limits { cpus: Some(100_000.0), ..Limits::NONE },
        Limits { memory_bytes: Some(u64::MAX), ..Limits::NONE },
        Limits { pids: Some(0), ..Limits::NONE },
    ];
    for limits in all {
        let mut refused = spec();
        refused.limits = limits;
        let error = runtime().start(&refused).await.unwrap_err();
        let is_named = matches!(&error, SandboxError::Invalid { what, .. } if what.starts_with("limits."));
        assert!(is_named, "{limits:?}: {error}");
    }
}

#[tokio::test]
async fn nothing_starts_while_the_machine_has_no_room() {
    let dir = tempfile::tempdir().unwrap();
    let mut impatient = spec();
    impatient.start_timeout = Duration::from_millis(300);
    let plain = NodeConfig { dir: dir.path().join("nodes"), ..NodeConfig::new(spec().guest) };
    for (memory, disk, what) in [(u64::MAX, 0, "memory"), (0, u64::MAX, "disk")] {
        let config = NodeConfig { min_free_memory: memory, min_free_disk: disk, ..plain.clone() };
        let node = Node::open(config).unwrap();
        let runtime = NamespaceRuntime::new(node, NamespaceConfig::default());
        let error = runtime.start(&impatient).await.unwrap_err();
        assert!(matches!(&error, SandboxError::NoRoom { what: told, .. } if *told == what), "{error}");
        assert_eq!(error.failure_class(), FailureClass::Resource);
    }
}

#[test]
fn a_folder_that_is_no_control_group_is_refused_and_nothing_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let [nodes, group] = ["nodes", "group"].map(|name| dir.path().join(name));
    fs::create_dir(&group).unwrap();
    for named in [group.clone(), dir.path().join("missing")] {
        let groups = GroupChoice::At(named.clone());
        let config = NodeConfig { dir: nodes.clone(), groups, ..NodeConfig::new(spec().guest) };
        let error = Node::open(config).unwrap_err();
        assert!(matches!(&error, SandboxError::Folder { path, .. } if *path == named), "{error}");
        assert!(error.to_string().contains("cannot hold the control groups of sandboxes"), "{error}");
    }
    assert!(!nodes.exists());
    let off = NodeConfig { dir: nodes.clone(), groups: GroupChoice::Off, ..NodeConfig::new(spec().guest) };
    drop(Node::open(off).unwrap());
}
