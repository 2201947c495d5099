//! The ids that the machine's administrator lets an ordinary user hand out: `/etc/subuid`, `/etc/subgid` and the two programs
//! that put them into a user namespace.

use std::{
    fs, io,
    ops::Range,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// How many ids of a range are used. With the user's own that is all of 0 to 65535, and one more.
pub(crate) const MAX_IDS: u32 = 65536;

/// Where the ids begin that are given out.
#[cfg(feature = "host")]
const FIRST_ID: u32 = 100_000;

/// Where the two programs are looked for. Not along `PATH`: they hold privileges, so nobody's setting chooses them.
const FOLDERS: [&str; 3] = ["/usr/bin", "/bin", "/usr/local/bin"];

/// One of the two kinds of id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Of users.
    User,
    /// Of groups.
    Group,
}

impl Kind {
    /// Returns the name of the program that writes a map of this kind.
    pub(crate) fn program(self) -> &'static str {
        match self {
            Self::User => "newuidmap",
            Self::Group => "newgidmap",
        }
    }

    /// Returns the path of the table of this kind.
    pub(crate) fn table(self) -> &'static str {
        match self {
            Self::User => "/etc/subuid",
            Self::Group => "/etc/subgid",
        }
    }

    /// Finds the program that writes a map of this kind.
    pub(crate) fn find_program(self) -> Option<PathBuf> {
        find(self.program())
    }
}

/// Finds a program of the system's.
fn find(name: &str) -> Option<PathBuf> {
    FOLDERS.iter().map(|folder| Path::new(folder).join(name)).find(|path| path.is_file())
}

/// Returns the names by which the tables may know a user: its number, and its name where one is known.
pub(crate) fn names_of(uid: u32) -> Vec<String> {
    let number = uid.to_string();
    let listed = fs::read_to_string("/etc/passwd").ok().and_then(|table| name_in(&table, &number));
    // A directory service knows users that the file does not. A static program cannot ask it, but `getent` can.
    let name = listed.or_else(|| {
        let mut command = Command::new(find("getent")?);
        command.args(["passwd", &number]).env_clear().stdin(Stdio::null()).stderr(Stdio::null());
        name_in(&String::from_utf8(command.output().ok()?.stdout).ok()?, &number)
    });
    name.into_iter().chain([number]).collect()
}

fn name_in(passwd: &str, number: &str) -> Option<String> {
    let line = passwd.lines().find(|line| line.split(':').nth(2) == Some(number))?;
    line.split(':').next().map(str::to_owned)
}

/// Returns the ids of one kind that a user may hand out, known by any of `names`.
///
/// # Errors
/// What is missing, for a person to read.
pub(crate) fn range(kind: Kind, names: &[String]) -> Result<Range<u32>, String> {
    let table = kind.table();
    let text = match fs::read_to_string(table) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(format!("there is no {table}")),
        Err(error) => return Err(format!("{table} cannot be read: {error}")),
        Ok(text) => text,
    };
    let user = names.first().map_or("?", String::as_str);
    range_in(&text, names).ok_or_else(|| format!("{table} has no line for {user}"))
}

/// Returns the longest range of a table that is one of the user's, cut to [`MAX_IDS`]. One that holds the host's 0 is none:
/// root inside must never be root outside.
fn range_in(table: &str, names: &[String]) -> Option<Range<u32>> {
    let ranges = table.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let (start, n_ids) = (fields.next()?.trim().parse::<u32>().ok()?, fields.next()?.trim().parse::<u32>().ok()?);
        let known = names.iter().any(|known| known == name);
        (known && start > 0 && n_ids > 0).then_some(())?;
        Some(start..start.checked_add(n_ids.min(MAX_IDS))?)
    });
    ranges.max_by_key(|range| (range.len(), std::cmp::Reverse(range.start)))
}

/// Returns the first id from which on nobody was given any, for a person who gives some.
#[cfg(feature = "host")]
pub(crate) fn first_free() -> u32 {
    let tables = [Kind::User, Kind::Group].map(|kind| fs::read_to_string(kind.table()).unwrap_or_default());
    tables.iter().map(|table| first_free_in(table)).max().unwrap_or(FIRST_ID)
}

#[cfg(feature = "host")]
fn first_free_in(table: &str) -> u32 {
    let ends = table.lines().filter_map(|line| {
        let mut fields = line.split(':').skip(1).map(|field| field.trim().parse::<u32>().ok());
        fields.next()??.checked_add(fields.next()??)
    });
    ends.max().unwrap_or(FIRST_ID).max(FIRST_ID)
}

/// Returns the ids of users and of groups that a user may hand out here, as far as that can be known without trying.
///
/// # Errors
/// Everything that is missing, for a person to read.
pub(crate) fn ranges(uid: u32) -> Result<(Range<u32>, Range<u32>), String> {
    let names = names_of(uid);
    let (users, groups) = (range(Kind::User, &names), range(Kind::Group, &names));
    let mut missing: Vec<String> = [&users, &groups].into_iter().filter_map(|range| range.clone().err()).collect();
    for kind in [Kind::User, Kind::Group] {
        if kind.find_program().is_none() {
            missing.push(format!("{} is not installed", kind.program()));
        }
    }
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    if status.lines().any(|line| line.split_whitespace().eq(["NoNewPrivs:", "1"])) {
        missing.push("newuidmap has no privilege here: what starts sandboxes has no_new_privs set".to_owned());
    }
    match (users, groups) {
        (Ok(users), Ok(groups)) if missing.is_empty() => Ok((users, groups)),
        _ => Err(missing.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(table: &str) -> Option<Range<u32>> {
        range_in(table, &["ada".to_owned(), "1001".to_owned()])
    }

    #[test]
    fn a_line_names_its_user_by_name_or_number() {
        assert_eq!(found("ada:100000:65536\n"), Some(100_000..165_536));
        assert_eq!(found("bob:1:9\n1001:200000:1000\n"), Some(200_000..201_000));
        assert_eq!(found("bob:100000:65536\nadam:5:5\n"), None);
    }

    #[test]
    fn the_longest_range_wins_and_no_more_than_needed_is_taken() {
        assert_eq!(found("ada:100000:10\nada:300000:4000000\nada:200000:70000\n"), Some(200_000..265_536));
    }

    #[test]
    fn nonsense_is_passed_over() {
        for table in ["", "ada\n", "ada:x:1\n", "ada:1\n", "ada:100000:0\n", "ada:4294967000:65536\n", "# ada:1:1\n"] {
            assert_eq!(found(table), None, "{table}");
        }
    }

    #[test]
    fn a_range_with_the_hosts_root_is_none() {
        assert_eq!(found("ada:0:65536\n"), None);
    }

    #[cfg(feature = "host")]
    #[test]
    fn ids_are_given_to_one_user_only() {
        assert_eq!(first_free_in(""), 100_000);
        assert_eq!(first_free_in("a:165536:65536\nb:100000:65536\nbad\nc:1:1\n"), 231_072);
    }

    #[test]
    fn a_user_has_the_name_of_its_number() {
        assert_eq!(name_in("root:x:0:0::/:/bin/sh\nada:x:1001:7::/:\n", "1001").as_deref(), Some("ada"));
        assert_eq!(names_of(0), ["root", "0"]);
        assert_eq!(names_of(4_000_000_123), ["4000000123"]);
    }
}
