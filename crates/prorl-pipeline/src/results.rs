//! Where ended jobs' results are kept until they are fetched or must make room.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
};

use parking_lot::Mutex;
use prorl_core::{JobId, JobResult};
use serde_json::{Map, Value};

/// What a store knows of a result.
#[derive(Clone, Debug)]
pub enum Lookup {
    /// Here it is.
    Found(Arc<JobResult>),
    /// It was here and had to make room.
    Dropped,
    /// Never seen, or forgotten long ago.
    Unknown,
}

/// The place of results: memory here; a journal or a broker elsewhere.
pub trait ResultStore: Send + Sync + 'static {
    /// Keeps a result; returns the ids of those that had to make room.
    fn put(&self, result: Arc<JobResult>) -> Vec<JobId>;

    /// Looks one up.
    fn get(&self, job_id: &JobId) -> Lookup;

    /// Forgets one, since its id starts a new attempt.
    fn forget(&self, job_id: &JobId);
}

/// Results in this process's memory, the oldest dropped first once they hold more than a limit.
#[derive(Debug)]
pub struct InMemoryResults {
    limit_bytes: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    bytes: usize,
    by_id: HashMap<JobId, (Arc<JobResult>, usize)>,
    order: VecDeque<JobId>,
    dropped: HashSet<JobId>,
    dropped_order: VecDeque<JobId>,
}

/// How many names of dropped results are remembered, to answer 410 and not 404.
const REMEMBERED: usize = 100_000;

impl InMemoryResults {
    /// Makes a store that holds about `limit_bytes`, and always at least the newest result.
    pub fn new(limit_bytes: usize) -> Self {
        Self { limit_bytes, state: Mutex::default() }
    }
}

/// Estimates the memory of a result: ids, log-probabilities and text are nearly all of it.
fn size_of(result: &JobResult) -> usize {
    let ids = |list: &Option<Vec<u32>>| list.as_ref().map_or(0, |ids| ids.len() * 4);
    let messages: usize = result
        .messages
        .iter()
        .map(|message| {
            let logprobs = message.logprobs.as_ref().map_or(0, |list| list.len() * 8);
            let text = match &message.content {
                prorl_core::Content::Text(text) => text.len(),
                prorl_core::Content::Parts(_) => message.content.text().len(),
            };
            256 + text + message.token_ids.len() * 4 + ids(&message.input_ids) + ids(&message.output_ids) + logprobs
        })
        .sum();
    let traces: usize =
        result.traces.iter().map(|trace| trace.prompt_ids().len() * 4 + trace.response_ids().len() * 13).sum();
    let texts: usize = result.warnings.iter().chain(&result.error).chain(&result.git_patch).map(String::len).sum();
    let calls: usize = result
        .messages
        .iter()
        .filter_map(|message| message.turn.as_ref())
        .flat_map(|turn| &turn.tool_calls)
        .map(|call| size_of_fields(&call.arguments))
        .sum();
    let values = size_of_fields(&result.report) + size_of_fields(&result.artifacts);
    let tools: usize = result.tools.iter().map(size_of_value).sum();
    2048 + messages + traces + texts + calls + values + tools
}

fn size_of_fields(fields: &Map<String, Value>) -> usize {
    fields.iter().map(|(name, value)| 64 + name.len() + size_of_value(value)).sum()
}

fn size_of_value(value: &Value) -> usize {
    32 + match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        Value::String(text) => text.len(),
        Value::Array(list) => list.iter().map(size_of_value).sum(),
        Value::Object(fields) => size_of_fields(fields),
    }
}

impl ResultStore for InMemoryResults {
    fn put(&self, result: Arc<JobResult>) -> Vec<JobId> {
        let mut made_room = Vec::new();
        let bytes = size_of(&result);
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.bytes += bytes;
        state.order.push_back(result.job_id.clone());
        if let Some((_, old)) = state.by_id.insert(result.job_id.clone(), (result, bytes)) {
            state.bytes -= old;
        }
        while state.bytes > self.limit_bytes && state.by_id.len() > 1 {
            let Some(oldest) = state.order.pop_front() else { break };
            let Some((_, bytes)) = state.by_id.remove(&oldest) else { continue };
            state.bytes -= bytes;
            made_room.push(oldest.clone());
            state.dropped.insert(oldest.clone());
            state.dropped_order.push_back(oldest);
            if state.dropped_order.len() > REMEMBERED
                && let Some(forgotten) = state.dropped_order.pop_front()
            {
                state.dropped.remove(&forgotten);
            }
        }
        made_room
    }

    fn get(&self, job_id: &JobId) -> Lookup {
        let state = self.state.lock();
        match state.by_id.get(job_id) {
            Some((result, _)) => Lookup::Found(Arc::clone(result)),
            None if state.dropped.contains(job_id) => Lookup::Dropped,
            None => Lookup::Unknown,
        }
    }

    fn forget(&self, job_id: &JobId) {
        let mut state = self.state.lock();
        if let Some((_, bytes)) = state.by_id.remove(job_id) {
            state.bytes -= bytes;
            state.order.retain(|id| id != job_id);
        }
        if state.dropped.remove(job_id) {
            state.dropped_order.retain(|id| id != job_id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prorl_core::{Outcome, StopReason};

    fn result(name: &str) -> Arc<JobResult> {
        let id = JobId::new(name).unwrap();
        Arc::new(JobResult::empty(id, "math", Outcome::completed(StopReason::Finish)))
    }

    #[test]
    fn the_oldest_makes_room_and_is_remembered_as_dropped() {
        let store = InMemoryResults::new(5000);
        for name in ["a", "b", "c"] {
            store.put(result(name));
        }
        assert!(matches!(store.get(&JobId::new("a").unwrap()), Lookup::Dropped));
        assert!(matches!(store.get(&JobId::new("c").unwrap()), Lookup::Found(_)));
        assert!(matches!(store.get(&JobId::new("x").unwrap()), Lookup::Unknown));
        store.forget(&JobId::new("a").unwrap());
        assert!(matches!(store.get(&JobId::new("a").unwrap()), Lookup::Unknown));
    }

    #[test]
    fn a_single_result_is_kept_whatever_its_size() {
        let store = InMemoryResults::new(1);
        store.put(result("a"));
        assert!(matches!(store.get(&JobId::new("a").unwrap()), Lookup::Found(_)));
        store.put(result("b"));
        assert!(matches!(store.get(&JobId::new("a").unwrap()), Lookup::Dropped));
    }
}
