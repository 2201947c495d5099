//! Limits that the kernel keeps in every runtime.

use prorl_sandbox::SandboxSpec;

use super::Ground;
use crate::support::Live;

/// Returns the processors that tasks may run on.
pub(crate) async fn processors(live: &Live) -> Vec<u32> {
    list(&live.sh("cat /proc/self/status").await)
}

/// Returns the processors that this process may run on.
pub(crate) fn own_processors() -> Vec<u32> {
    list(&std::fs::read_to_string("/proc/thread-self/status").unwrap())
}

fn list(status: &str) -> Vec<u32> {
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    let range = |range: &str| {
        let (from, to) = range.split_once('-').unwrap_or((range, range));
        from.parse::<u32>().unwrap()..=to.parse().unwrap()
    };
    list.trim().split(',').flat_map(range).collect()
}

pub(super) async fn tasks_run_on_as_many_processors_as_the_limit_says_and_know_it(ground: &Ground) {
    let numbers = "echo ${OMP_NUM_THREADS-unset} ${GOMAXPROCS-unset} ${MKL_NUM_THREADS-unset}";
    let mut limited: SandboxSpec = ground.spec();
    limited.limits.cpus = Some(0.5);
    limited.env.push(("MKL_NUM_THREADS".to_owned(), "3".to_owned()));
    let live = ground.start(&limited).await;
    assert_eq!(processors(&live).await.len(), 1);
    assert_eq!(live.sh(numbers).await, "1 1 3");
    live.shut().await;

    let free = ground.start(&ground.spec()).await;
    assert_eq!(processors(&free).await, own_processors());
    assert_eq!(free.sh(numbers).await, "unset unset unset");
    free.shut().await;
}
