//! What the jobs of a group have in common before init: made by one of them, seen by all.
//!
//! A job that needs it holds its [`Group`] from submit until no attempt of it can begin any more, so what was made lives as
//! long as somebody may start from it and not longer. Of the jobs that come to init one at a time makes it, under a
//! [`Lead`]; the others wait without a worker. A failure is told to all that wait. A leader that is cancelled says nothing
//! about the work, so the next one is given the lead. One that ran out of time says that its time was not enough; see
//! [`Tried`] for when that is the end of it.

use std::{
    any::Any,
    collections::{BTreeMap, HashMap},
    fmt,
    panic::AssertUnwindSafe,
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::FutureExt;
use parking_lot::Mutex;
use prorl_core::{FailureClass, GroupId};
use serde_json::{Map, Value};
use tokio::sync::oneshot;

use crate::{AgentHandler, JobContext, StageError, drive::panic_text};

/// What [`AgentHandler::init_shared`] made for the jobs of a group.
///
/// It is dropped when no job of the group can start from it any more.
///
/// A job makes it within its own time for init. When that runs out, the job ends as a timeout and the next of those that
/// wait begins anew; but a job does not try what two others, with at least as much time, ran out of time with. So when
/// nobody that waits has more time than that, all of them fail, with failure class `handler`, instead of running out of time
/// one after another. A job with more time always has its try, and those with less wait for it. Leaders that were
/// cancelled do not count, nor do those before it was last made or failed. A job submitted after the others failed begins
/// anew.
#[derive(Clone)]
pub struct Shared {
    state: Arc<dyn Any + Send + Sync>,
    /// What the handler wants to remember of it.
    pub metadata: Map<String, Value>,
    /// What the result of each job that starts from it is to say.
    pub warnings: Vec<String>,
}

impl Shared {
    /// Keeps a state, which is the handler's own affair.
    pub fn new(state: impl Any + Send + Sync) -> Self {
        Self { state: Arc::new(state), metadata: Map::new(), warnings: Vec::new() }
    }

    /// Returns the state, when it is of this type.
    pub fn state<T: Any>(&self) -> Option<&T> {
        self.state.downcast_ref()
    }
}

impl Default for Shared {
    /// No state.
    fn default() -> Self {
        Self::new(())
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { state: _, metadata, warnings } = self;
        f.debug_struct("Shared").field("metadata", metadata).field("warnings", warnings).finish_non_exhaustive()
    }
}

/// Which jobs share: those of one group and handler whose handler has the same word for what they need.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) handler: String,
    pub(crate) group_id: GroupId,
    pub(crate) text: String,
}

/// The groups that have a job. It holds none of them itself.
#[derive(Default)]
pub(crate) struct Groups {
    known: Mutex<HashMap<Key, Weak<Group>>>,
    n_waiting: AtomicUsize,
}

impl Groups {
    /// Returns the group of a key, made when no job holds it.
    pub(crate) fn of(self: &Arc<Self>, key: Key) -> Arc<Group> {
        let mut known = self.known.lock();
        if let Some(group) = known.get(&key).and_then(Weak::upgrade) {
            return group;
        }
        let group = Arc::new(Group { key: key.clone(), groups: Arc::clone(self), state: Mutex::default() });
        known.insert(key, Arc::downgrade(&group));
        group
    }

    /// Returns how many jobs left the queue and wait for what another makes.
    pub(crate) fn n_waiting(&self) -> usize {
        self.n_waiting.load(Ordering::Relaxed)
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.known.lock().len()
    }
}

/// The jobs of one key.
pub(crate) struct Group {
    key: Key,
    groups: Arc<Groups>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    made: Option<Arc<Shared>>,
    /// The number of the job that makes it now.
    leader: Option<u64>,
    waiting: BTreeMap<u64, Waiter>,
    last_number: u64,
    tried: Tried,
}

struct Waiter {
    time: Duration,
    sender: oneshot::Sender<Word>,
}

/// The counted time that leaders had and ran out of since it was last made or failed: the two longest, longest first.
///
/// With twice the same result nobody tries a third time who has no more time than that: a setup that hangs would take a
/// worker and the whole time for init of one job after another.
#[derive(Clone, Copy, Default)]
struct Tried([Duration; 2]);

impl Tried {
    fn add(&mut self, time: Duration) {
        let [longest, second] = self.0;
        self.0 = [longest.max(time), second.max(longest.min(time))];
    }

    /// Tells whether it is worth a try for one that has this much time.
    fn allows(self, time: Duration) -> bool {
        let [_, second] = self.0;
        second.is_zero() || time > second
    }

    fn error(self) -> StageError {
        let [_, second] = self.0;
        let message = format!("shared init: took longer than init may ({:.3} s), twice", second.as_secs_f64());
        StageError::text(FailureClass::Handler, message)
    }
}

/// What one that waits is told.
type Word = Result<Part, StageError>;

/// A job's part in what its group shares.
pub(crate) enum Part {
    /// It is there.
    Follow(Arc<Shared>),
    /// It is this job's to make.
    Lead(Lead),
}

pub(crate) enum Joined {
    Now(Part),
    Later(Wait),
}

impl Drop for Group {
    fn drop(&mut self) {
        let mut known = self.groups.known.lock();
        // Another may have been made since the last hold on this one was dropped.
        if known.get(&self.key).is_some_and(|group| group.strong_count() == 0) {
            known.remove(&self.key);
        }
    }
}

impl Group {
    /// Tells a job that has come to init, and can give it this much counted time, its part.
    ///
    /// # Errors
    /// When it would have to lead, and others have tried for as long.
    pub(crate) fn join(self: &Arc<Self>, time: Duration) -> Result<Joined, StageError> {
        let mut state = self.state.lock();
        if let Some(made) = &state.made {
            return Ok(Joined::Now(Part::Follow(Arc::clone(made))));
        }
        if state.leader.is_none() && !state.tried.allows(time) {
            return Err(state.tried.error());
        }
        state.last_number += 1;
        let number = state.last_number;
        if state.leader.is_none() {
            state.leader = Some(number);
            return Ok(Joined::Now(Part::Lead(Lead { group: Arc::clone(self), number, time })));
        }
        let (sender, word) = oneshot::channel();
        state.waiting.insert(number, Waiter { time, sender });
        self.groups.n_waiting.fetch_add(1, Ordering::Relaxed);
        Ok(Joined::Later(Wait { group: Arc::clone(self), number, word }))
    }

    /// Tells all that wait how it ended. Nobody listens to one that has lost the lead.
    fn end(&self, number: u64, made: &Result<Arc<Shared>, StageError>) {
        let waiting = {
            let mut state = self.state.lock();
            if state.leader != Some(number) {
                return;
            }
            state.leader = None;
            state.made = made.as_ref().ok().cloned();
            state.tried = Tried::default();
            std::mem::take(&mut state.waiting)
        };
        tell(waiting, made);
    }

    /// Leaves the key to those who come later. The jobs that hold this group keep what it knows.
    fn retire(&self) {
        let mut known = self.groups.known.lock();
        if known.get(&self.key).is_some_and(|group| std::ptr::eq(group.as_ptr(), self)) {
            known.remove(&self.key);
        }
    }
}

fn tell(waiting: BTreeMap<u64, Waiter>, made: &Result<Arc<Shared>, StageError>) {
    for waiter in waiting.into_values() {
        // One that has left meanwhile need not know.
        let _left = waiter.sender.send(made.clone().map(Part::Follow));
    }
}

/// A job that waits for what another makes. Dropping it leaves.
pub(crate) struct Wait {
    group: Arc<Group>,
    number: u64,
    word: oneshot::Receiver<Word>,
}

impl Wait {
    /// Waits until it is there, failed, or is this job's to make.
    ///
    /// # Cancel safety
    /// Dropping it loses nothing, as long as the `Wait` is dropped too.
    pub(crate) async fn word(&mut self) -> Word {
        (&mut self.word).await.expect("a sender leaves the group with a word, or with this receiver")
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        self.group.state.lock().waiting.remove(&self.number);
        self.group.groups.n_waiting.fetch_sub(1, Ordering::Relaxed);
        // A lead that was given and not read is dropped with the receiver, and goes to the next.
    }
}

/// The task of making what the group shares. Dropped before that has ended, it goes to the next one that waits.
pub(crate) struct Lead {
    group: Arc<Group>,
    number: u64,
    time: Duration,
}

impl Lead {
    /// Returns the work itself. It may be left behind: once this lead is dropped its outcome means nothing.
    pub(crate) fn work(&self) -> Work {
        Work { group: Arc::clone(&self.group), number: self.number }
    }

    /// Gives the lead up because the job's time for it has run out.
    pub(crate) fn ran_out(self) {
        let mut state = self.group.state.lock();
        // Otherwise it is init that took too long, after what is shared was made.
        if state.leader == Some(self.number) {
            state.tried.add(self.time);
        }
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        let (next, left, tried) = {
            let mut state = self.group.state.lock();
            if state.leader != Some(self.number) {
                return;
            }
            let tried = state.tried;
            state.leader =
                state.waiting.iter().find(|(_, waiter)| tried.allows(waiter.time)).map(|(number, _)| *number);
            let next = state.leader.and_then(|number| state.waiting.remove_entry(&number));
            let left = if next.is_none() { std::mem::take(&mut state.waiting) } else { BTreeMap::new() };
            (next, left, tried)
        };
        let group = &self.group;
        if let Some((number, Waiter { time, sender })) = next {
            tracing::debug!(group = %group.key.group_id, "the shared init goes to the next job of the group");
            // To one that has left it comes back, and goes to the next when it is dropped here.
            let _back = sender.send(Ok(Part::Lead(Self { group: Arc::clone(group), number, time })));
        } else if !tried.allows(Duration::ZERO) {
            let error = tried.error();
            tracing::warn!(group = %group.key.group_id, n_waiting = left.len(), %error, "nobody tries it again");
            // First, so that a job submitted by somebody who saw one of these fail begins anew.
            group.retire();
            tell(left, &Err(error));
        }
    }
}

/// See [`Lead::work`].
pub(crate) struct Work {
    group: Arc<Group>,
    number: u64,
}

impl Work {
    /// Makes what the group shares, and tells those who wait.
    pub(crate) async fn make(self, handler: &dyn AgentHandler, job: &JobContext) -> Result<Arc<Shared>, StageError> {
        let made = match AssertUnwindSafe(handler.init_shared(job)).catch_unwind().await {
            Ok(Ok(shared)) => Ok(Arc::new(shared)),
            Ok(Err(error)) => Err(StageError::text(error.class, format!("shared init: {error}"))),
            Err(panic) => {
                let text = panic_text(panic.as_ref());
                Err(StageError::text(FailureClass::Handler, format!("shared init: panicked: {text}")))
            }
        };
        self.group.end(self.number, &made);
        made
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn key(text: &str) -> Key {
        Key { handler: "probe".to_owned(), group_id: GroupId::new("g").unwrap(), text: text.to_owned() }
    }

    const LIMIT: Duration = Duration::from_secs(5);

    fn join(group: &Arc<Group>) -> Joined {
        group.join(LIMIT).unwrap()
    }

    fn lead(joined: Joined) -> Lead {
        match joined {
            Joined::Now(Part::Lead(lead)) => lead,
            _ => panic!("expected the lead"),
        }
    }

    fn wait(joined: Joined) -> Wait {
        match joined {
            Joined::Later(wait) => wait,
            Joined::Now(_) => panic!("expected to wait"),
        }
    }

    #[test]
    fn a_group_is_known_as_long_as_somebody_holds_it() {
        let groups = Arc::new(Groups::default());
        let first = groups.of(key("a"));
        assert!(Arc::ptr_eq(&first, &groups.of(key("a"))));
        let other = groups.of(key("b"));
        assert!(!Arc::ptr_eq(&first, &other));
        assert_eq!(groups.len(), 2);
        drop(first);
        assert_eq!(groups.len(), 1);
        drop(other);
        assert_eq!(groups.len(), 0);
    }

    #[test]
    fn a_lead_that_is_dropped_goes_to_the_next_that_is_still_there_in_order() {
        let groups = Arc::new(Groups::default());
        let group = groups.of(key("a"));
        let leader = lead(join(&group));
        let (gone, mut second, mut third) = (wait(join(&group)), wait(join(&group)), wait(join(&group)));
        assert_eq!(groups.n_waiting(), 3);
        drop(gone);
        drop(leader);
        assert!(third.word().now_or_never().is_none());
        let Some(Ok(Part::Lead(leader))) = second.word().now_or_never() else { panic!("it is the second's turn") };
        drop(second);
        drop(leader);
        // Given, and never read.
        drop(third);
        assert_eq!(groups.n_waiting(), 0);
        drop(lead(join(&group)));
        drop(lead(join(&group)));
    }

    #[test]
    fn work_that_was_left_behind_ends_without_being_heard() {
        let groups = Arc::new(Groups::default());
        let group = groups.of(key("a"));
        let first = lead(join(&group));
        let stuck = first.work();
        let mut second = wait(join(&group));
        drop(first);
        let Some(Ok(Part::Lead(leader))) = second.word().now_or_never() else { panic!("it is the second's turn") };
        stuck.group.end(stuck.number, &Ok(Arc::default()));
        let mut third = wait(join(&group));
        leader.work().group.end(leader.number, &Err(StageError::text(FailureClass::Sandbox, "no")));
        drop(leader);
        assert!(third.word().now_or_never().unwrap().is_err());
        // One that comes after a failure tries again.
        let leader = lead(join(&group));
        let mut fourth = wait(join(&group));
        group.end(leader.number, &Ok(Arc::default()));
        assert!(matches!(fourth.word().now_or_never(), Some(Ok(Part::Follow(_)))));
        assert!(matches!(join(&group), Joined::Now(Part::Follow(_))));
    }

    #[test]
    fn what_two_ran_out_of_time_with_is_tried_only_by_one_with_more() {
        let groups = Arc::new(Groups::default());
        let group = groups.of(key("a"));
        let leader = lead(join(&group));
        let (mut second, mut third) = (wait(join(&group)), wait(join(&group)));
        let mut longer = wait(group.join(LIMIT * 2).unwrap());
        leader.ran_out();
        let Some(Ok(Part::Lead(leader))) = second.word().now_or_never() else { panic!("once says little") };
        leader.ran_out();
        assert!(third.word().now_or_never().is_none(), "it is not lost yet");
        let Some(Ok(Part::Lead(leader))) = longer.word().now_or_never() else { panic!("it has more time") };
        assert!(Arc::ptr_eq(&group, &groups.of(key("a"))));
        drop(leader); // cancelled
        let Some(Err(error)) = third.word().now_or_never() else { panic!("nobody can make it") };
        assert_eq!(error.class, FailureClass::Handler);
        assert_eq!(error.message, "shared init: took longer than init may (5.000 s), twice");
        // Those who come later begin anew, while those who were there know what was tried.
        let later = groups.of(key("a"));
        drop(lead(join(&later)));
        assert_eq!(group.join(LIMIT).err(), Some(error));
        let leader = lead(group.join(LIMIT + Duration::from_millis(1)).unwrap());
        drop((leader, second, third, longer, group));
        assert!(Arc::ptr_eq(&later, &groups.of(key("a"))), "the old one takes its own place along and no other");
        drop(later);
        assert_eq!((groups.len(), groups.n_waiting()), (0, 0));
    }

    #[test]
    fn what_was_tried_is_forgotten_once_it_has_failed() {
        let groups = Arc::new(Groups::default());
        let group = groups.of(key("a"));
        for _ in 0..3 {
            let leader = lead(join(&group));
            leader.ran_out();
            let leader = lead(join(&group));
            group.end(leader.number, &Err(StageError::text(FailureClass::Sandbox, "no")));
            // Its own time may run out after that, which says nothing about what is shared.
            leader.ran_out();
        }
    }

    #[test]
    fn the_two_longest_count() {
        let mut tried = Tried::default();
        assert!(tried.allows(Duration::ZERO));
        for (secs, bar) in [(5, 0), (2, 2), (3, 3), (1, 3), (7, 5), (0, 5), (7, 7)] {
            tried.add(Duration::from_secs(secs));
            assert!(tried.allows(Duration::from_secs(bar) + Duration::from_nanos(1)));
            assert_eq!(tried.allows(Duration::from_secs(bar)), bar == 0, "{secs}");
        }
    }
}
