//! What the kernel's texts tell of processes. Names in them are the sandbox's to choose.

/// As long as a name can be.
const MAX_NAME: usize = 16;

/// What `status` tells of a process. Sizes are in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Status {
    /// Its name, with nothing in it but what can be printed.
    pub(super) name: String,
    /// One letter.
    pub(super) state: u8,
    /// Number of its parent.
    pub(super) parent: u32,
    pub(super) threads: u32,
    /// Whether it has any memory: neither a dead one has, nor one that is just ending.
    pub(super) has_memory: bool,
    /// Addresses in use.
    pub(super) addresses: u64,
    /// Pages that are no file's, huge ones too, and tables of pages, and what is swapped out.
    pub(super) private: u64,
    /// Pages of shared memory, which are a file's in memory at times.
    pub(super) shared: u64,
    /// Tables of pages, part of `private`.
    pub(super) tables: u64,
}

impl Status {
    pub(super) fn parse(text: &[u8]) -> Option<Self> {
        let mut status = Self::default();
        let (mut anon, mut all) = (None, 0);
        for line in text.split(|byte| *byte == b'\n') {
            let Some(colon) = line.iter().position(|byte| *byte == b':') else { continue };
            let (key, rest) = line.split_at(colon);
            let rest = rest.get(1..).unwrap_or_default();
            match key {
                b"Name" => status.name = printable(rest),
                b"State" => status.state = *rest.iter().find(|byte| byte.is_ascii_alphabetic())?,
                b"PPid" => status.parent = u32::try_from(number(rest)?).ok()?,
                b"Threads" => status.threads = u32::try_from(number(rest)?).ok()?,
                b"VmSize" => (status.addresses, status.has_memory) = (kib(rest)?, true),
                b"VmRSS" => all = kib(rest)?,
                b"RssAnon" => anon = Some(kib(rest)?),
                b"RssShmem" => status.shared = kib(rest)?,
                b"VmPTE" => status.tables = kib(rest)?,
                b"VmSwap" | b"HugetlbPages" => status.private = status.private.saturating_add(kib(rest)?),
                _ => {}
            }
        }
        // A kernel before 4.5 does not tell files' pages from others.
        status.private = status.private.saturating_add(anon.unwrap_or(all)).saturating_add(status.tables);
        (status.state != 0).then_some(status)
    }

    /// Returns what it may have at most, in bytes: pages that others share are counted whole.
    pub(super) fn most(&self) -> u64 {
        self.private.saturating_add(self.shared)
    }

    /// Tells whether it does, or would.
    pub(super) fn runs(&self) -> bool {
        !matches!(self.state, b'Z' | b'X') || self.threads > 1
    }
}

/// What `stat` tells of a process or thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stat {
    /// One letter.
    pub(super) state: u8,
    /// Number of its parent.
    pub(super) parent: u32,
    /// Number of the process that leads its session.
    pub(super) session: u32,
    /// How often it has been given a page that it had not, or not for itself.
    pub(super) faults: u64,
    /// How often its children have which it has waited for, and theirs.
    pub(super) faults_of_children: u64,
    /// Clock ticks that it has had a processor.
    pub(super) ticks: u64,
    /// Those that its children had which it has waited for, and theirs.
    pub(super) ticks_of_children: u64,
    pub(super) threads: u32,
}

impl Stat {
    pub(super) fn parse(line: &[u8]) -> Option<Self> {
        // The name in brackets may hold anything, brackets and blanks too; numbers follow the last bracket.
        let end = line.iter().rposition(|byte| *byte == b')')?;
        let rest = std::str::from_utf8(line.get(end + 1..)?).ok()?;
        let mut fields = rest.split_ascii_whitespace();
        let state = *fields.next()?.as_bytes().first()?;
        let fields: Vec<&str> = fields.take(17).collect();
        // One that is just being reaped has some no more, and the kernel tells -1.
        let small = |idx: usize| Some(fields.get(idx)?.parse::<i64>().ok()?.try_into().unwrap_or(0));
        let large = |idx: usize| fields.get(idx)?.parse::<u64>().ok();
        Some(Self {
            state,
            parent: small(0)?,
            session: small(2)?,
            faults: large(6)?.saturating_add(large(8)?),
            faults_of_children: large(7)?.saturating_add(large(9)?),
            ticks: large(10)?.saturating_add(large(11)?),
            ticks_of_children: large(12)?.saturating_add(large(13)?),
            threads: small(16)?,
        })
    }

    /// Tells whether it runs or wants to.
    pub(super) fn wants_to_run(&self) -> bool {
        self.state == b'R'
    }
}

/// The share of a process in memory that is no file's on a disk, in bytes. Each page is divided among those that map it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Share {
    /// Of its own memory, with what is swapped out.
    pub(super) own: u64,
    /// Of shared memory.
    pub(super) shared: u64,
    /// What of both nobody else maps, at least.
    pub(super) alone: u64,
}

impl Share {
    pub(super) fn parse(text: &[u8]) -> Option<Self> {
        let (mut all, mut own, mut shared, mut file, mut alone, mut besides) = (None, None, None, 0_u64, 0_u64, 0_u64);
        for line in text.split(|byte| *byte == b'\n') {
            let Some(colon) = line.iter().position(|byte| *byte == b':') else { continue };
            let (key, rest) = line.split_at(colon);
            let size = || kib(rest.get(1..).unwrap_or_default());
            match key {
                b"Pss" => all = Some(size()?),
                b"Pss_Anon" => own = Some(size()?),
                b"Pss_Shmem" => shared = Some(size()?),
                b"Pss_File" => file = size()?,
                b"Private_Clean" | b"Private_Dirty" => alone = alone.saturating_add(size()?),
                b"SwapPss" | b"Private_Hugetlb" => besides = besides.saturating_add(size()?),
                _ => {}
            }
        }
        // A kernel before 5.9 does not tell kinds; then what is alone may be a file's.
        let alone = if own.is_some() { alone.saturating_sub(file) } else { 0 };
        let own = own.or(all)?.saturating_add(besides);
        Some(Self { own, shared: shared.unwrap_or(0), alone })
    }

    pub(super) fn all(&self) -> u64 {
        self.own.saturating_add(self.shared)
    }

    /// Returns both together.
    pub(super) fn plus(&self, other: &Self) -> Self {
        Self {
            own: self.own.saturating_add(other.own),
            shared: self.shared.saturating_add(other.shared),
            alone: self.alone.saturating_add(other.alone),
        }
    }

    /// Returns all of it, where so much shared memory is held, mapped or not. What is mapped may be part of it, or of a file in
    /// memory, which is bounded by its file system.
    pub(super) fn with_held(&self, held: u64) -> u64 {
        self.own.saturating_add(self.shared.max(held))
    }
}

/// Reads the limit of processes in `/proc/PID/limits`.
pub(super) fn parse_most_processes(text: &[u8]) -> Option<u32> {
    let line = text.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"Max processes"))?;
    let soft = line.split(u8::is_ascii_whitespace).find(|word| !word.is_empty())?;
    number(soft)?.try_into().ok()
}

/// Returns a size that is told in kibibytes, in bytes.
fn kib(text: &[u8]) -> Option<u64> {
    number(text)?.checked_mul(1024)
}

/// Returns the number that a text begins with, after blanks.
pub(super) fn number(text: &[u8]) -> Option<u64> {
    let text = text.trim_ascii_start();
    let len = text.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    std::str::from_utf8(text.get(..len)?).ok()?.parse().ok()
}

/// Makes a name of bytes that a task has chosen: no more than a name can have, and nothing in it that a terminal or a reader
/// could take for something else.
fn printable(name: &[u8]) -> String {
    let name = name.strip_prefix(b"\t").unwrap_or(name);
    let printable =
        name.iter().take(MAX_NAME).map(|byte| if byte.is_ascii_graphic() { char::from(*byte) } else { '?' });
    let text: String = printable.collect();
    if text.is_empty() { "?".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STATUS: &[u8] = b"Name:\tpython3\nUmask:\t0022\nState:\tS (sleeping)\nTgid:\t37\nPid:\t37\nPPid:\t5\n\
        VmSize:\t  20000 kB\nVmRSS:\t   9000 kB\nRssAnon:\t   4000 kB\nRssFile:\t   4500 kB\nRssShmem:\t    500 kB\n\
        VmPTE:\t      60 kB\nVmSwap:\t       8 kB\nThreads:\t3\n";

    #[test]
    fn memory_is_what_is_no_files() {
        let status = Status::parse(STATUS).unwrap();
        let expected = Status {
            name: "python3".to_owned(),
            state: b'S',
            parent: 5,
            threads: 3,
            has_memory: true,
            addresses: 20_000 << 10,
            private: (4000 + 60 + 8) << 10,
            shared: 500 << 10,
            tables: 60 << 10,
        };
        assert_eq!(status, expected);
        assert_eq!(status.most(), 4568 << 10);
        let old = Status::parse(b"Name:\ta\nState:\tR\nVmSize:\t20 kB\nVmRSS:\t12 kB\nThreads:\t1\n").unwrap();
        assert_eq!(old.most(), 12 << 10);
    }

    #[test]
    fn the_dead_have_no_memory() {
        let dead = Status::parse(b"Name:\ta\nState:\tZ (zombie)\nPPid:\t1\nThreads:\t1\n").unwrap();
        assert!(!dead.has_memory && !dead.runs() && dead.most() == 0);
        let leader = Status::parse(b"Name:\ta\nState:\tZ (zombie)\nPPid:\t1\nThreads:\t2\n").unwrap();
        assert!(leader.runs(), "its threads do");
    }

    #[test]
    fn names_are_made_printable() {
        let named = |name: &str| Status::parse(format!("Name:\t{name}\nState:\tS\n").as_bytes()).unwrap().name;
        assert_eq!(named("a b\x1b[31m\\n"), "a?b?[31m\\n");
        assert_eq!(named("x".repeat(40).as_str()), "x".repeat(16));
        assert_eq!(named(""), "?");
        assert_eq!(named("Größe"), "Gr????e");
    }

    #[test]
    fn a_name_of_brackets_and_blanks_hides_nothing() {
        let line = b"42 (a) R (\xff 1 2 3) S 7 8 9 0 -1 4194560 1 2 3 4 50 6 7 8 20 0 13 0 4711 1 2\n";
        assert_eq!(
            Stat::parse(line),
            Some(Stat {
                state: b'S',
                parent: 7,
                session: 9,
                faults: 4,
                faults_of_children: 6,
                ticks: 56,
                ticks_of_children: 15,
                threads: 13
            })
        );
        assert_eq!(Stat::parse(b"42 (a) S 7 8 9"), None);
    }

    #[test]
    fn the_limit_of_processes_is_read() {
        let text = b"Limit                     Soft Limit           Hard Limit           Units     \n\
            Max stack size            8388608              unlimited            bytes     \n\
            Max processes             67                   67                   processes \n";
        assert_eq!(parse_most_processes(text), Some(67));
        assert_eq!(parse_most_processes(b"Max processes   unlimited  unlimited  processes\n"), None);
        assert_eq!(parse_most_processes(b""), None);
    }

    #[test]
    fn a_share_leaves_out_files() {
        let text =
            b"1-2 ---p 0 0 0 [rollup]\nRss: 100 kB\nPss: 90 kB\nPss_Dirty: 1 kB\nPss_Anon: 40 kB\nPss_File: 45 kB\n\
            Pss_Shmem: 5 kB\nPrivate_Clean: 30 kB\nPrivate_Dirty: 38 kB\nPrivate_Hugetlb: 4 kB\nSwapPss: 2 kB\n";
        let share = Share { own: 46 << 10, shared: 5 << 10, alone: 23 << 10 };
        assert_eq!(Share::parse(text), Some(share));
        assert_eq!(share.all(), 51 << 10);
        let old = Share { own: 90 << 10, ..Share::default() };
        assert_eq!(Share::parse(b"Rss: 100 kB\nPss: 90 kB\nPrivate_Dirty: 80 kB\n"), Some(old));
        assert_eq!(Share::parse(b""), None);
    }

    proptest! {
        #[test]
        fn nonsense_is_no_harm(bytes: Vec<u8>, cut in 0..STATUS.len()) {
            let _ = (Status::parse(&bytes), Stat::parse(&bytes), Share::parse(&bytes));
            let _ = Status::parse(&STATUS[..cut]);
            let mut named = b"Name:\t".to_vec();
            named.extend(&bytes);
            let name = Status::parse(&[&named[..], b"\nState:\tS\n"].concat()).map(|status| status.name);
            prop_assert!(name.is_none_or(|name| (1..=16).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic())));
        }
    }
}
