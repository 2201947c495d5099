//! What runs below a process.

use std::{collections::HashMap, fs, io};

use super::process::is_silent;

/// One process, as `/proc` says.
struct Seen {
    pid: u32,
    name: String,
    is_dead: bool,
}

/// Names the processes that descend from process 1 of a sandbox, with the numbers that they have there. What has ended and
/// was not reaped yet is none of them.
pub(crate) fn below(first: u32) -> io::Result<Vec<String>> {
    let mut children: HashMap<u32, Vec<Seen>> = HashMap::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        match fs::read(format!("/proc/{pid}/stat")) {
            Ok(line) => {
                let (parent, seen) =
                    parse(pid, &line).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no process status"))?;
                children.entry(parent).or_default().push(seen);
            }
            Err(error) if is_silent(&error) => {}
            Err(error) => return Err(error),
        }
    }
    let mut found = Vec::new();
    let mut left = vec![first];
    while let Some(parent) = left.pop() {
        for child in children.remove(&parent).unwrap_or_default() {
            left.push(child.pid);
            if !child.is_dead {
                found.push(format!("{} (pid {})", child.name, inside(child.pid).unwrap_or(child.pid)));
            }
        }
    }
    Ok(found)
}

/// Returns a process and the number of its parent.
fn parse(pid: u32, line: &[u8]) -> Option<(u32, Seen)> {
    // The name in brackets may hold anything, brackets and blanks too.
    let (start, end) = (line.iter().position(|byte| *byte == b'(')?, line.iter().rposition(|byte| *byte == b')')?);
    let name = String::from_utf8_lossy(line.get(start + 1..end)?).escape_debug().to_string();
    let mut fields = std::str::from_utf8(&line[end + 1..]).ok()?.split_ascii_whitespace();
    let is_dead = matches!(fields.next()?, "Z" | "X");
    Some((fields.next()?.parse().ok()?, Seen { pid, name, is_dead }))
}

/// Returns the number that a process has in the innermost of its pid namespaces.
fn inside(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("NSpid:"))?.split_whitespace().last()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn names_may_hold_anything() {
        let (parent, seen) = parse(7, b"7 (a) b (\x1b\xff) S 5 1 1\n").unwrap();
        assert_eq!((parent, seen.is_dead), (5, false));
        assert_eq!(seen.name, "a) b (\\u{1b}\u{fffd}");
        assert!(parse(7, b"7 (a) Z 5").unwrap().1.is_dead);
        assert!(parse(7, b"").is_none());
    }

    #[test]
    fn all_generations_are_found_and_the_dead_are_not() {
        let script = "sh -c 'sleep 1000 & echo; wait' & wait";
        let mut child = Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        io::BufRead::read_line(&mut io::BufReader::new(child.stdout.take().unwrap()), &mut line).unwrap();
        // A process has its name once it has executed its program.
        let found = loop {
            let found = below(child.id()).unwrap();
            assert_eq!(found.len(), 2, "{found:?}");
            if found.iter().any(|name| name.starts_with("sleep (pid ")) {
                break found;
            }
            std::thread::yield_now();
        };
        for name in found {
            let pid = name.trim_end_matches(')').rsplit(' ').next().unwrap().parse().unwrap();
            super::super::process::Handle::of(pid).unwrap().unwrap().kill();
        }
        child.wait().unwrap();
        assert_eq!(below(child.id()).unwrap(), Vec::<String>::new());
    }
}
