//! A setup that is made once for a group.

use std::{collections::BTreeSet, sync::Arc};

use futures_util::future::join_all;
use prorl_core::{FailureClass, JobResult, Stage, Status};
use prorl_pipeline::{CancelAnswer, JobHandle, SubmitError};
use serde_json::json;

use crate::support::{Rig, bash, close, finish, no_layers, observed, open_temp, python, request, store};

/// Makes a state that no second run would make again.
const SETUP: &str = "mkdir -p data/empty
head -c 16 /dev/urandom | od -An -tx1 > data/token
ln data/token data/linked
echo half > data/log
: > data/runs
read line || echo 'no input' >> data/log";

/// Says the state, changes it, and says it again.
const LOOK: &str = "import os
before = open('data/token').read().strip()
log = open('data/log').read().split()
open('data/log', 'a').write('more\\n')
open('data/mine', 'x').write('1')
print(before, len(os.listdir('data')), log, os.stat('data/token').st_nlink)";

async fn results(rig: &Rig, n_jobs: usize, group: Option<&str>) -> Vec<Arc<JobResult>> {
    let jobs: Vec<_> = (0..n_jobs).map(|_| rig.submit(group, &json!({"setup": SETUP}))).collect();
    join_all(jobs.iter().map(JobHandle::result)).await
}

fn states(results: &[Arc<JobResult>]) -> BTreeSet<String> {
    for result in results {
        assert_eq!((result.outcome.status, result.reward), (Status::Completed, Some(1.0)), "{:?}", result.error);
    }
    results.iter().map(|result| observed(result)[0].clone()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_jobs_of_a_group_start_from_one_setup_and_do_not_see_each_other() {
    let temp = open_temp();
    let store = store(temp.path());
    let rig = Rig::start(&[python(LOOK), finish()], Some(&store), |_| {}).await;
    let together = results(&rig, 8, Some("g")).await;
    let states_of_group = states(&together);
    assert_eq!(states_of_group.len(), 1, "{states_of_group:?}");
    let state = states_of_group.first().unwrap();
    assert!(state.contains("6 ['half', 'no', 'input'] 2"), "{state}");
    no_layers(&store).await;
    // Another group has a state of its own, and so has each job without one.
    let [other, alone] = [states(&results(&rig, 3, Some("h")).await), states(&results(&rig, 3, None).await)];
    assert_eq!((other.len(), alone.len()), (1, 3));
    assert!(other.is_disjoint(&states_of_group));
    no_layers(&store).await;
    rig.pipeline.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_store_each_job_is_set_up_by_itself() {
    let rig = Rig::start(&[python(LOOK), finish()], None, |_| {}).await;
    assert_eq!(states(&results(&rig, 3, Some("g")).await).len(), 3);
    rig.pipeline.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn where_the_store_takes_no_layer_each_job_is_set_up_by_itself_and_says_why() {
    // What is seen before setup, and what is seen when there is a layer to keep.
    for folder in ["staging", "layers"] {
        let temp = open_temp();
        let store = store(temp.path());
        let rig = Rig::start(&[python(LOOK), finish()], Some(&store), |_| {}).await;
        close(&store, folder);
        let results = results(&rig, 3, Some("g")).await;
        assert_eq!(states(&results).len(), 3, "{folder}");
        for result in &results {
            let [warning] = &*result.warnings else { panic!("{folder}: {:?}", result.warnings) };
            let expected = "setup ran for this job alone, since its group can share nothing: failed to";
            assert!(warning.starts_with(expected) && warning.contains(folder), "{warning}");
        }
        rig.pipeline.close().await;
        assert_eq!(rig.pipeline.sandboxes().active, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_setup_that_fails_says_how_to_each_job() {
    let temp = open_temp();
    let store = store(temp.path());
    let rig = Rig::start(&[finish()], Some(&store), |_| {}).await;
    for (setup, expected) in [
        ("echo out; echo oops >&2; exit 3", "setup exited with code 3: out\noops"),
        ("seq 1 1000; false", "setup exited with code 1: 991\n992"),
        ("kill -KILL $$", "setup was killed by signal 9"),
        ("no-such-program", "setup exited with code 127: /tmp/setup.sh: line 1: no-such-program: command not found"),
    ] {
        for group in [Some("g"), None] {
            let jobs: Vec<_> = (0..3).map(|_| rig.submit(group, &json!({"setup": setup}))).collect();
            for result in join_all(jobs.iter().map(JobHandle::result)).await {
                assert_eq!(result.outcome.failure_class, Some(FailureClass::Handler));
                assert_eq!((result.outcome.stage, result.attempt), (Some(Stage::Init), 1));
                assert_eq!(result.image, "host");
                let error = result.error.as_deref().unwrap();
                let own = error.strip_prefix("shared init: ");
                assert_eq!(own.is_some(), group.is_some(), "{error}");
                assert!(own.unwrap_or(error).starts_with(expected), "{error}");
                assert!(error.len() < 1200, "{error}");
            }
        }
    }
    no_layers(&store).await;
    assert_eq!(rig.pipeline.sandboxes().active, 0);
    rig.pipeline.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_cannot_share_a_process() {
    let temp = open_temp();
    let store = store(temp.path());
    let rig = Rig::start(&[finish()], Some(&store), |_| {}).await;
    let setup = "setsid sleep 1000 < /dev/null > /dev/null 2>&1 &
        until [ \"$(cat /proc/$!/comm)\" = sleep ]; do :; done";
    let setup = json!({"setup": setup});
    let result = rig.run(Some("g"), &setup).await;
    assert_eq!(result.outcome.failure_class, Some(FailureClass::Handler));
    let error = result.error.as_deref().unwrap();
    assert!(error.starts_with("shared init: setup left sleep (pid "), "{error}");
    // One that shares with nobody may leave what it likes.
    let result = rig.run(None, &setup).await;
    assert_eq!(result.outcome.status, Status::Completed, "{:?}", result.error);
    rig.pipeline.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_setup_has_the_time_of_the_init_stage() {
    let temp = open_temp();
    let store = store(temp.path());
    let rig = Rig::start(&[finish()], Some(&store), |_| {}).await;
    for group in [Some("g"), None] {
        let mut job = request(group, &json!({"setup": "sleep 1000"}));
        job.stage_timeouts.init = Some(2.0);
        let result = rig.pipeline.submit(job).unwrap().result().await;
        assert_eq!((result.outcome.status, result.outcome.stage), (Status::Timeout, Some(Stage::Init)));
    }
    // The next of a group begins anew when the first one is cancelled.
    let fifo = temp.path().join("never");
    let jobs = [(); 2].map(|()| rig.submit(Some("g"), &json!({"setup": format!("sleep 1000 # {}", fifo.display())})));
    let id = jobs[0].id();
    assert!(matches!(rig.pipeline.cancel(id), CancelAnswer::Found(_)));
    assert_eq!(jobs[0].result().await.outcome.status, Status::Cancelled);
    drop(jobs);
    rig.pipeline.close().await;
    assert_eq!(rig.pipeline.sandboxes().active, 0);
    no_layers(&store).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn in_a_fake_root_files_belong_to_whom_they_were_given() {
    let temp = open_temp();
    let store = store(temp.path());
    let rig = Rig::start(&[bash("stat -c '%u %a %n' data/*; cat /etc/mark"), finish()], Some(&store), |_| {}).await;
    let setup = "mkdir data; : > data/own; : > data/given; chown 7 data/given; chmod 4711 data/given
        echo marked > /etc/mark";
    let fields = json!({"setup": setup, "fakeroot": true, "tools": ["bash", "finish"]});
    let jobs: Vec<_> = (0..4).map(|_| rig.submit(Some("g"), &fields)).collect();
    let mut seen = BTreeSet::new();
    for result in join_all(jobs.iter().map(JobHandle::result)).await {
        assert_eq!(result.outcome.status, Status::Completed, "{:?}", result.error);
        seen.insert(observed(&result)[0].clone());
    }
    let alone = rig.run(None, &fields).await;
    assert_eq!(seen, [observed(&alone)[0].clone()].into(), "a group sees what one alone sees");
    no_layers(&store).await;
    rig.pipeline.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_setup_that_is_no_text_is_refused_by_name() {
    let rig = Rig::start(&[finish()], None, |_| {}).await;
    let refused = rig.pipeline.submit(request(None, &json!({"setup": ["ls"]}))).err().unwrap();
    assert!(matches!(&refused, SubmitError::InvalidInstance(problem) if problem.field == "instance.setup"));
    rig.pipeline.close().await;
}
