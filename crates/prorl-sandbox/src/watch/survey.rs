//! What a sandbox's processes have together, found out little by little: the kernel takes as long for each as walking through all of
//! its pages.
//!
//! Those that were given pages since they were last read are read first. A sum is no more than what there is, even if not all have been
//! read: so a sandbox has too much as soon as those that have been read do.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    hidden::Hidden,
    machine::News,
    maps::Id,
    status::{Share, Status},
    table::{GUEST, Process, Table},
};

/// How long processes are read at a time, at least one. Listing them comes on top, and takes no more of the time than this.
const TURN: Duration = Duration::from_millis(8);

/// What to find out of each process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Wanted {
    /// The objects of shared memory that it maps.
    Objects,
    /// These, and its share of pages.
    Shares,
}

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Not all were read yet.
    Part,
    /// The sandbox has more than its limit.
    TooMuch,
    /// It holds no more shared memory than its limit.
    Fine,
    /// It has so many bytes, no more than its limit, and had so when the machine was like this.
    Has(u64, News),
}

/// What is known of the processes, and of what they hold together.
#[derive(Debug)]
pub(super) struct Survey {
    limit: u64,
    hidden: Hidden,
    known: HashMap<u32, Known>,
    /// What each object has, if it tells.
    objects: HashMap<Id, Option<u64>>,
    round: Option<Round>,
    n_rounds: u64,
    n_turns: u64,
    buffer: Vec<u8>,
}

/// A time that all processes are read once, in as many turns as it takes.
#[derive(Clone, Copy, Debug)]
struct Round {
    nth: u64,
    wanted: Wanted,
    /// Whether objects are looked at too.
    with_objects: bool,
    /// What was known of the machine before.
    news: News,
    took: Duration,
}

/// A process when it was last read.
#[derive(Debug, Default)]
struct Known {
    round: u64,
    turn: u64,
    faults: u64,
    most: u64,
    share: Share,
    objects: Vec<Id>,
}

/// A process as it is now.
#[derive(Clone, Copy, Debug)]
struct Current {
    pid: u32,
    most: u64,
    faults: u64,
    /// How many pages it was given since it was last read.
    given: u64,
    is_changed: bool,
    is_read: bool,
}

/// What those have together that were read in a turn.
#[derive(Debug, Default)]
struct Sum {
    share: Share,
    objects: HashSet<Id>,
    greatest: u64,
    n_read: usize,
}

impl Survey {
    pub(super) fn new(limit: u64) -> Self {
        Self {
            limit,
            hidden: Hidden::new(limit),
            known: HashMap::new(),
            objects: HashMap::new(),
            round: None,
            n_rounds: 0,
            n_turns: 0,
            buffer: Vec::new(),
        }
    }

    /// Takes note of what the machine has.
    pub(super) fn note(&mut self, news: &News) {
        self.hidden.note(news);
    }

    /// Tells whether shared memory may be hidden of which nothing is known yet.
    pub(super) fn is_due(&self, news: &News) -> bool {
        self.hidden.is_due(news)
    }

    /// Tells whether some processes have been read and others are to be.
    pub(super) fn is_under_way(&self) -> bool {
        self.round.is_some()
    }

    /// Ends the round, whatever is missing, and returns how long it took.
    pub(super) fn end_round(&mut self) -> Duration {
        self.round.take().map_or(Duration::ZERO, |round| round.took)
    }

    /// Forgets a process that is being killed.
    pub(super) fn forget(&mut self, pid: u32) {
        self.forget_all(|known| known != pid);
    }

    /// Forgets all processes but these.
    pub(super) fn keep(&mut self, all: &[&(u32, Status)]) {
        if !self.known.is_empty() {
            let there: HashSet<u32> = all.iter().map(|(pid, _)| *pid).collect();
            self.forget_all(|known| there.contains(&known));
        }
    }

    fn forget_all(&mut self, is_there: impl Fn(u32) -> bool) {
        let held = self.has_objects();
        self.known.retain(|pid, _| is_there(*pid));
        if held && !self.has_objects() {
            self.hidden.look_again();
        }
    }

    fn has_objects(&self) -> bool {
        self.known.values().any(|known| !known.objects.is_empty())
    }

    /// Returns what shared memory the processes that have been read hold, mapped or not.
    pub(super) fn hidden(&self, news: &News) -> u64 {
        self.held(news, &self.known.values().flat_map(|known| known.objects.iter().copied()).collect())
    }

    fn held(&self, news: &News, objects: &HashSet<Id>) -> u64 {
        let has = |id: &Id| self.objects.get(id).copied().flatten();
        let told = objects.iter().filter_map(has).fold(0, u64::saturating_add);
        let silent = objects.iter().filter(|id| has(id).is_none()).copied();
        told.saturating_add(self.hidden.most(news, silent))
    }

    /// Returns what those have together that have been read.
    pub(super) fn total(&self, news: &News) -> u64 {
        let add = |sum: Share, known: &Known| sum.plus(&known.share);
        self.known.values().fold(Share::default(), add).with_held(self.hidden(news))
    }

    /// Returns the processes that have been read, the one that has most first: shared memory counts whole for each that holds it.
    pub(super) fn greediest(&self, news: &News) -> Vec<u32> {
        let of_one = |known: &Known| known.share.with_held(self.held(news, &known.objects.iter().copied().collect()));
        let mut all: Vec<_> = self.known.iter().map(|(pid, known)| (of_one(known), *pid)).collect();
        all.sort_unstable_by_key(|one| std::cmp::Reverse(*one));
        all.into_iter().map(|(_, pid)| pid).collect()
    }

    /// Reads some of the processes, which were listed after `news`.
    pub(super) fn turn(&mut self, news: &News, table: &Table, all: &[&(u32, Status)], wanted: Wanted) -> Found {
        let begun = Instant::now();
        let with_objects = self.hidden.is_due(news) || self.has_objects();
        let is_enough = |round: &Round| round.wanted >= wanted && (round.with_objects || !with_objects);
        let mut round = self.round.filter(is_enough).unwrap_or_else(|| {
            self.n_rounds += 1;
            Round { nth: self.n_rounds, wanted, with_objects, news: *news, took: Duration::ZERO }
        });
        self.n_turns += 1;
        let statuses: HashMap<u32, &Status> = all.iter().map(|(pid, status)| (*pid, status)).collect();
        let mut changed = self.current(table, all, &round);
        let mut unread: Vec<_> = changed.extract_if(.., |one| !one.is_changed).filter(|one| !one.is_read).collect();
        changed.sort_unstable_by_key(|one| std::cmp::Reverse((one.given, one.most)));
        unread.extend(changed.iter().filter(|one| !one.is_read));
        unread.sort_unstable_by_key(|one| std::cmp::Reverse(one.most));
        // Half of the turn is for those that change, however many there are, so that the others are read at some time too.
        let turn = TURN.max(begun.elapsed());
        let both = [(&changed, turn / 2), (&unread, turn)];
        let start = Instant::now();
        let (mut sum, mut is_too_much) = (Sum::default(), false);
        for (one, time) in both.into_iter().flat_map(|(list, time)| list.iter().map(move |one| (one, time))) {
            let is_read = self.known.get(&one.pid).is_some_and(|known| known.turn == self.n_turns);
            // When it is clear that there is too much, who has most is not yet.
            let is_in_vain = is_too_much && one.most <= sum.greatest;
            if is_read || is_in_vain || (sum.n_read > 0 && start.elapsed() > time) {
                continue;
            }
            let Some(status) = statuses.get(&one.pid) else { continue };
            self.read(table, one, status, &round, &mut sum);
            is_too_much = is_too_much || sum.share.with_held(self.held(news, &sum.objects)) > self.limit;
        }
        let is_of_round = |pid: u32| self.known.get(&pid).is_some_and(|known| known.round == round.nth);
        let is_over = changed.iter().chain(&unread).all(|one| is_of_round(one.pid));
        round.took = round.took.saturating_add(begun.elapsed());
        self.round = Some(round);
        if is_too_much || self.least(news, &changed) > self.limit {
            return Found::TooMuch;
        }
        if !is_over {
            return Found::Part;
        }
        if round.with_objects {
            let objects: HashSet<Id> = self.known.values().flat_map(|known| known.objects.iter().copied()).collect();
            self.hidden.is_looked_at(&round.news, &objects);
            self.objects.retain(|id, _| objects.contains(id));
        }
        match round.wanted {
            Wanted::Objects => Found::Fine,
            Wanted::Shares if self.total(news) > self.limit => Found::TooMuch,
            Wanted::Shares => Found::Has(self.total(news), round.news),
        }
    }

    /// Finds out which processes are there still, and what each has done since it was last read.
    fn current(&mut self, table: &Table, all: &[&(u32, Status)], round: &Round) -> Vec<Current> {
        let mut current = Vec::with_capacity(all.len());
        let mut faults_of_all = 0_u64;
        let guest = table.stat(GUEST, &mut self.buffer);
        for (pid, status) in all {
            let Some(stat) = table.stat(*pid, &mut self.buffer) else { continue };
            faults_of_all = faults_of_all.saturating_add(stat.faults).saturating_add(stat.faults_of_children);
            let (faults, most) = (stat.faults, status.most());
            let known = self.known.get(pid);
            current.push(Current {
                pid: *pid,
                most,
                faults,
                given: known.map_or(faults, |known| faults.saturating_sub(known.faults)),
                is_changed: known.is_none_or(|known| (known.faults, known.most) != (faults, most)),
                is_read: known.is_some_and(|known| known.round == round.nth),
            });
        }
        let of_guest = guest.map_or(0, |stat| stat.faults.saturating_add(stat.faults_of_children));
        self.hidden.note_faults(faults_of_all.saturating_add(of_guest));
        current
    }

    /// Reads a process, and adds what it has to a sum.
    fn read(&mut self, table: &Table, one: &Current, status: &Status, round: &Round, sum: &mut Sum) {
        let mut known = self.known.remove(&one.pid).unwrap_or_default();
        let Some(process) = Process::open(table, one.pid) else { return self.is_gone(one, round) };
        if round.wanted == Wanted::Shares {
            known.share = match process.share(&mut self.buffer) {
                Some(share) => Share { own: share.own.saturating_add(status.tables), ..share },
                None if process.is_reaped() => return self.is_gone(one, round),
                None => Share { own: status.private, shared: status.shared, alone: 0 },
            };
        }
        if round.with_objects {
            known.objects.clear();
            let (mut told, limit) = (0_u64, self.limit);
            let mut ends = HashMap::new();
            let read = process.objects(&mut self.buffer, |object| {
                // One may be mapped in several parts.
                let end = ends.entry(object.id).or_insert_with(|| {
                    told = told.saturating_add(object.has.unwrap_or(0));
                    object.end
                });
                *end = object.end.max(*end);
                self.objects.insert(object.id, object.has);
                told <= limit.saturating_mul(2)
            });
            for (id, end) in &ends {
                self.hidden.note_object(*id, *end);
            }
            known.objects.extend(ends.into_keys());
            if read.is_err() && !process.is_reaped() {
                known.objects.push(unknown(one.pid));
            }
        }
        sum.share = sum.share.plus(&known.share);
        sum.objects.extend(&known.objects);
        sum.greatest = sum.greatest.max(known.share.all());
        sum.n_read += 1;
        let (round, turn) = (round.nth, self.n_turns);
        self.known.insert(one.pid, Known { round, turn, faults: one.faults, most: one.most, ..known });
    }

    /// Takes note that a process has nothing any more.
    fn is_gone(&mut self, one: &Current, round: &Round) {
        self.known.insert(one.pid, Known { round: round.nth, turn: self.n_turns, ..Known::default() });
    }

    /// Returns what all have together at least: the shares of those that have not changed since they were read, and of those that were
    /// read just now what nobody else maps, which is in no other share.
    fn least(&self, news: &News, changed: &[Current]) -> u64 {
        let changed: HashSet<u32> = changed.iter().map(|one| one.pid).collect();
        let of_one = |(pid, known): (&u32, &Known)| match known.turn == self.n_turns {
            true => known.share.alone.min(known.share.all()),
            false if changed.contains(pid) => 0,
            false => known.share.all(),
        };
        let shares = self.known.iter().map(of_one).fold(0, u64::saturating_add);
        let mapped = self.known.values().map(|known| known.share.shared).fold(0, u64::saturating_add);
        shares.saturating_add(self.hidden(news).saturating_sub(mapped))
    }
}

/// Stands for the objects of a process that this user may not know.
fn unknown(pid: u32) -> Id {
    (u64::MAX, u64::from(pid))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    /// Processes that sleep, and what they are like.
    fn sleepers(n: usize) -> (Vec<Child>, Table, Vec<(u32, Status)>) {
        let children: Vec<_> = (0..n).map(|_| Command::new("sleep").arg("1000").spawn().unwrap()).collect();
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
        let table = Table::new(rustix::fs::open("/proc", flags, rustix::fs::Mode::empty()).unwrap());
        let mut all = Vec::new();
        for child in &children {
            // It has spawned, and so executed its program.
            all.push((child.id(), table.status(child.id(), &mut Vec::new()).unwrap()));
        }
        (children, table, all)
    }

    fn end(children: Vec<Child>) {
        for mut child in children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    #[test]
    fn all_are_read_in_a_round_and_again_in_the_next() {
        let (children, table, all) = sleepers(3);
        let all: Vec<_> = all.iter().collect();
        let mut survey = Survey::new(1 << 40);
        let news = News { shared: Some(1 << 20), handed_out: Some(7), ..News::default() };
        survey.note(&news);
        let total = loop {
            match survey.turn(&news, &table, &all, Wanted::Shares) {
                Found::Part => {}
                Found::Has(total, then) if then == news => break total,
                found => panic!("{found:?}"),
            }
        };
        assert!(total > 0 && survey.known.len() == 3 && !survey.is_due(&news), "{survey:?}");
        survey.end_round();
        assert!(!survey.is_under_way());
        survey.keep(&all[1..]);
        assert!(survey.total(&news) < total);
        end(children);
    }

    #[test]
    fn nobody_else_is_read_when_some_have_too_much_and_the_others_have_less() {
        let (children, table, all) = sleepers(3);
        let mut all: Vec<_> = all.iter().map(|(pid, status)| (*pid, status.clone())).collect();
        all[1].1.private = 0;
        all[2].1.private = 0;
        all[1].1.shared = 0;
        all[2].1.shared = 0;
        let all: Vec<_> = all.iter().collect();
        let mut survey = Survey::new(1);
        let news = News::default();
        assert_eq!(survey.turn(&news, &table, &all, Wanted::Shares), Found::TooMuch);
        assert!(survey.known.len() < 3, "{survey:?}");
        assert!(!survey.greediest(&news).is_empty());
        end(children);
    }

    #[test]
    fn those_that_changed_count_with_what_is_their_own_and_the_others_with_their_share() {
        let mut survey = Survey::new(1000);
        let share = Share { own: 600, shared: 0, alone: 100 };
        survey.n_turns = 2;
        for (pid, turn) in [(1, 1), (2, 2), (3, 1)] {
            survey.known.insert(pid, Known { turn, share, ..Known::default() });
        }
        let third = Current { pid: 3, most: 0, faults: 0, given: 1, is_changed: true, is_read: true };
        assert_eq!(survey.least(&News::default(), &[third]), 600 + 100);
        assert_eq!(survey.total(&News::default()), 1800);
    }
}
