//! The pool: who gets which backend, and that no place is ever lost.

use std::{
    num::{NonZeroU32, NonZeroUsize},
    time::Duration,
};

use prorl_core::{SamplingParams, status::BackendStatus};
use prorl_llm::{
    dialect::{GenerateRequest, LlmError},
    mock::{MockLlm, Script},
    pool::{AddError, BackendSpec, Kind, Lease, Policy, Pool, PoolConfig},
    tokenizer::ChatTokenizer,
};
use tokio::{net::TcpListener, task::JoinSet, time::timeout};
use tokio_util::sync::CancellationToken;

const LIMIT: Duration = Duration::from_secs(20);

fn config() -> PoolConfig {
    PoolConfig {
        probe_interval: Duration::from_millis(20),
        probe_timeout: Duration::from_secs(5),
        eject_after: NonZeroU32::new(2).unwrap(),
        ..PoolConfig::default()
    }
}

/// A backend that is never asked anything.
fn unprobed(address: &str) -> BackendSpec {
    BackendSpec { probe: false, kind: Kind::Generate, ..BackendSpec::new(address) }
}

async fn pool_of(policy: Policy, n: usize) -> Pool {
    let pool = Pool::new(PoolConfig { policy, ..config() });
    for idx in 0..n {
        pool.add(unprobed(&format!("http://127.0.0.1:{}", idx + 1))).await.unwrap();
    }
    pool
}

fn active(pool: &Pool) -> Vec<usize> {
    pool.list().iter().map(|status| status.active).collect()
}

async fn mock() -> MockLlm {
    MockLlm::spawn(ChatTokenizer::builtin(), Script::default()).await.unwrap()
}

async fn ask(lease: &Lease, limit: Duration) -> Result<prorl_llm::dialect::Generation, LlmError> {
    let params = SamplingParams::default();
    let request = GenerateRequest {
        prompt_ids: &[1, 2, 3],
        params: &params,
        max_tokens: 16,
        seed: Some(1),
        request_id: "r",
        session_id: lease.session(),
        vocab_size: 5000,
    };
    lease.generate(&request, limit).await
}

#[tokio::test]
async fn tasks_spread_evenly_and_stay() {
    for policy in [Policy::Active, Policy::Assigned] {
        let pool = pool_of(policy, 3).await;
        let leases: Vec<Lease> = (0..8).map(|_| pool.try_acquire("t").unwrap()).collect();
        let mut counts = active(&pool);
        counts.sort_unstable();
        assert_eq!(counts, [2, 3, 3]);
        let address = leases[0].address().to_owned();
        pool.add(unprobed("http://127.0.0.1:9")).await.unwrap();
        assert_eq!(leases[0].address(), address);
        assert!(leases.iter().all(Lease::is_alive));
        drop(leases);
        assert_eq!(active(&pool), [0, 0, 0, 0]);
        assert_eq!(pool.list().iter().map(|status| status.assigned).sum::<u64>(), 8);
    }
}

#[tokio::test]
async fn being_told_of_room_counts_nothing() {
    for policy in [Policy::Active, Policy::Assigned] {
        let pool = pool_of(policy, 2).await;
        let mut addresses = Vec::new();
        for _ in 0..12 {
            timeout(LIMIT, pool.ready()).await.unwrap();
            addresses.push(pool.acquire("t").await.address().to_owned());
            timeout(LIMIT, pool.ready()).await.unwrap();
        }
        assert!(addresses.windows(2).all(|pair| pair[0] != pair[1]), "{policy:?}: {addresses:?}");
        let assigned: Vec<u64> = pool.list().iter().map(|status| status.assigned).collect();
        assert_eq!((assigned, active(&pool)), (vec![6, 6], vec![0, 0]), "{policy:?}");
    }
}

#[tokio::test]
async fn who_waits_for_room_is_told_of_each_way_it_comes() {
    let pool = Pool::new(config());
    let mut ready = Box::pin(pool.ready());
    assert!(futures_util::poll!(ready.as_mut()).is_pending());
    // A backend comes.
    let spec = BackendSpec { max_concurrent: NonZeroUsize::new(1), ..unprobed("http://127.0.0.1:1") };
    pool.add(spec.clone()).await.unwrap();
    timeout(LIMIT, ready).await.unwrap();
    // A place becomes free, and nobody else waits for it.
    let lease = pool.acquire("t").await;
    let mut ready = Box::pin(pool.ready());
    let mut gone = Box::pin(pool.ready());
    let mut next = Box::pin(pool.acquire("next"));
    assert!(futures_util::poll!(ready.as_mut()).is_pending());
    assert!(futures_util::poll!(gone.as_mut()).is_pending());
    assert!(futures_util::poll!(next.as_mut()).is_pending());
    drop(gone);
    drop(lease);
    assert!(futures_util::poll!(ready.as_mut()).is_pending());
    drop(timeout(LIMIT, next).await.unwrap());
    timeout(LIMIT, ready).await.unwrap();
    // All backends are replaced.
    let _lease = pool.acquire("t").await;
    let mut ready = Box::pin(pool.ready());
    assert!(futures_util::poll!(ready.as_mut()).is_pending());
    pool.swap(vec![unprobed("http://127.0.0.1:2")], None).await.unwrap();
    timeout(LIMIT, ready).await.unwrap();
    assert_eq!(pool.n_waiting(), 0);
}

#[tokio::test]
async fn waiters_are_served_in_turn_and_may_leave() {
    let pool = Pool::new(config());
    let spec = BackendSpec { max_concurrent: NonZeroUsize::new(1), ..unprobed("http://127.0.0.1:1") };
    // Nothing is there yet: all of them wait.
    let mut first = Box::pin(pool.acquire("first"));
    let mut gone = Box::pin(pool.acquire("gone"));
    let mut second = Box::pin(pool.acquire("second"));
    for waiter in [&mut first, &mut gone, &mut second] {
        assert!(futures_util::poll!(waiter.as_mut()).is_pending());
    }
    assert_eq!(pool.n_waiting(), 3);
    drop(gone);
    assert_eq!(pool.n_waiting(), 2);
    pool.add(spec).await.unwrap();
    let lease = timeout(LIMIT, first).await.unwrap();
    assert_eq!(lease.session(), "first");
    assert!(pool.try_acquire("pushy").is_none());
    assert!(futures_util::poll!(second.as_mut()).is_pending());
    drop(lease);
    assert!(pool.try_acquire("pushy").is_none(), "the place was granted already");
    // One that was granted a place and leaves before it looked gives the place back.
    drop(second);
    assert_eq!((active(&pool), pool.n_waiting()), (vec![0], 0));
    assert!(pool.try_acquire("pushy").is_some());
}

#[tokio::test]
async fn many_tasks_leave_no_count_behind() {
    let mock = mock().await;
    let pool = Pool::new(config());
    let spec = BackendSpec { max_concurrent: NonZeroUsize::new(4), ..BackendSpec::new(mock.address()) };
    pool.add(spec).await.unwrap();
    let mut tasks = JoinSet::new();
    for idx in 0..60 {
        let pool = pool.clone();
        tasks.spawn(async move {
            let lease = pool.acquire(&format!("t{idx}")).await;
            match idx % 3 {
                0 => drop(ask(&lease, LIMIT).await.unwrap()),
                1 => assert!(ask(&lease, Duration::ZERO).await.is_err()),
                _ => assert!(timeout(Duration::ZERO, ask(&lease, LIMIT)).await.is_err()),
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    let status = &pool.list()[0];
    assert_eq!((status.active, status.assigned, pool.n_waiting()), (0, 60, 0));
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn clear_and_swap_number_the_weights() {
    let pool = pool_of(Policy::Active, 2).await;
    let version = |status: &BackendStatus| status.weight_version;
    assert_eq!(pool.list().iter().map(version).collect::<Vec<_>>(), [0, 0]);
    let lease = pool.try_acquire("t").unwrap();
    assert_eq!(pool.clear(), 2);
    assert!(pool.list().is_empty() && !lease.is_alive());
    // Added again while a task is on it: the task stays, with the new version.
    let status = pool.add(unprobed(&format!("{}/v1/", lease.address()))).await.unwrap();
    assert_eq!((status.weight_version, status.active), (1, 1));
    assert!(lease.is_alive());
    let swapped = pool.swap(vec![unprobed("http://127.0.0.1:1"), unprobed("http://127.0.0.1:7")], None).await.unwrap();
    assert_eq!(swapped.iter().map(version).collect::<Vec<_>>(), [2, 2]);
    assert_eq!(swapped.iter().map(|status| status.active).collect::<Vec<_>>(), [1, 0]);
    let swapped = pool.swap(vec![unprobed("http://127.0.0.1:7")], Some(40)).await.unwrap();
    assert_eq!((swapped[0].weight_version, lease.is_alive()), (40, false));
    assert_eq!(
        pool.add(BackendSpec { weight_version: Some(41), ..unprobed("http://127.0.0.1:8") })
            .await
            .unwrap()
            .weight_version,
        41
    );
    assert_eq!(pool.add(unprobed("http://127.0.0.1:9")).await.unwrap().weight_version, 3);
    // A swap that names an unusable backend changes nothing.
    let before = pool.list();
    pool.swap(vec![unprobed("http://127.0.0.1:1"), unprobed("nonsense")], None).await.unwrap_err();
    assert_eq!(pool.list(), before);
    drop(lease);
    assert!(pool.remove("http://127.0.0.1:9/v1").unwrap() && !pool.remove("http://127.0.0.1:9").unwrap());
    assert_eq!(pool.list().len(), 2);
}

#[tokio::test]
async fn bad_specs_are_refused() {
    let pool = Pool::new(config());
    for address in ["localhost:8000", "https://h:1", "http://u:p@h:1", "http://h:1/x"] {
        assert!(matches!(pool.add(BackendSpec::new(address)).await, Err(AddError::BadAddress(_))), "{address}");
    }
    for kind in [Kind::Sglang, Kind::VllmGenerate] {
        let err = pool.add(BackendSpec { kind, ..BackendSpec::new("http://127.0.0.1:1") }).await.unwrap_err();
        assert!(err.to_string().contains("not supported yet"), "{err}");
    }
    assert!(pool.list().is_empty());
}

#[tokio::test]
async fn dialects_are_found_out() {
    let mock = mock().await;
    let pool = Pool::new(config());
    let status = pool.add(BackendSpec::new(mock.address())).await.unwrap();
    assert_eq!((status.kind.as_str(), status.model.as_deref(), status.healthy), ("vllm", Some("prorl-mock"), true));
    let status = pool.add(BackendSpec { kind: Kind::Generate, ..BackendSpec::new(mock.address()) }).await.unwrap();
    assert_eq!(status.kind, "generate");
    assert_eq!(pool.list().len(), 1);
    mock.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_backend_that_starts_later_is_used_then() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let pool = Pool::new(config());
    let status = pool.add(BackendSpec::new(format!("http://{address}"))).await.unwrap();
    assert!(!status.healthy && status.reason.is_some_and(|reason| reason.contains("no connection")));
    assert!(pool.try_acquire("t").is_none());

    let stop = CancellationToken::new();
    let watching = async {
        let mock =
            MockLlm::start(TcpListener::bind(address).await.unwrap(), ChatTokenizer::builtin(), Script::default())
                .unwrap();
        let lease = timeout(LIMIT, pool.acquire("t")).await.unwrap();
        assert_eq!(pool.list()[0].kind, "vllm");
        ask(&lease, LIMIT).await.unwrap();

        // It dies: the next call notices, and nobody is sent there any more.
        mock.shutdown().await.unwrap();
        let err = ask(&lease, LIMIT).await.unwrap_err();
        assert!(matches!(err, LlmError::Connect { .. }) && err.is_retryable(), "{err}");
        assert!(!lease.is_alive() && pool.try_acquire("u").is_none());

        // It is back: a probe takes it in again.
        let mut ready = Box::pin(pool.ready());
        assert!(futures_util::poll!(ready.as_mut()).is_pending());
        let mock =
            MockLlm::start(TcpListener::bind(address).await.unwrap(), ChatTokenizer::builtin(), Script::default())
                .unwrap();
        timeout(LIMIT, ready).await.unwrap();
        let again = timeout(LIMIT, pool.acquire("u")).await.unwrap();
        assert!(again.is_alive() && lease.is_alive());
        mock.shutdown().await.unwrap();
        // Nobody calls: two failed probes eject it.
        while pool.list()[0].healthy {
            tokio::task::yield_now().await;
        }
        stop.cancel();
    };
    timeout(LIMIT, async { tokio::join!(pool.run(stop.clone()), watching) }).await.unwrap();
}
