//! What the arguments of `prorl sandbox exec` say.

use std::{
    ffi::OsStr,
    fmt::Display,
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, anyhow, bail, ensure};
use nix::unistd::geteuid;
use prorl_sandbox::{
    Bind, Network, SandboxSpec,
    egress::{EgressConfig, Rules},
};

use super::ExecArgs;
use crate::egress::ProxyUrl;

/// Where a command that may reach some hosts finds the way to them, on its own loopback interface.
const PROXY_PORT: u16 = 3128;

/// The longest limit: a hundred years, which every clock on the way can hold.
const MAX_TIMEOUT: Duration = Duration::from_hours(100 * 365 * 24);

/// The longest `NAME=VALUE` that Linux gives to a program: 32 pages with the byte that ends it.
const MAX_VARIABLE_BYTES: usize = 32 * 4096 - 1;

/// How much longer than its command a sandbox may live: the command's limit counts from a later start.
const LIFE_MARGIN: Duration = Duration::from_mins(1);

/// What is to be done.
pub(super) struct Wanted {
    /// The sandbox, but for its guest and its image.
    pub(super) spec: SandboxSpec,
    /// The command; empty for a shell.
    pub(super) command: Vec<String>,
    /// Folder to run in, if not the sandbox's own.
    pub(super) workdir: Option<String>,
    /// How long the command may take.
    pub(super) limit: Duration,
    /// Which hosts it may reach, if any, and by which way.
    pub(super) egress: Option<(Rules, EgressConfig)>,
}

impl Wanted {
    /// Reads the arguments.
    ///
    /// # Errors
    /// What is wrong with them; never a variable's value.
    pub(super) fn new(args: &ExecArgs) -> anyhow::Result<Self> {
        if args.sandboxes.sandbox_user.is_some() && !geteuid().is_root() {
            bail!("--sandbox-user or PRORL_SANDBOX_USER: only root can choose another user than itself");
        }
        args.sandboxes.groups().map_err(|problem| anyhow!("--cgroup: {problem}"))?;
        let limit = limit(args.timeout)?;
        let command = args.command.iter().enumerate();
        let command = command.map(|(idx, given)| utf8(format_args!("CMD, word {}", idx + 1), given));
        let workdir = args.workdir.as_ref().map(|given| utf8("--workdir", given)).transpose()?;
        ensure!(!args.image.as_os_str().is_empty(), "IMAGE: expected an image, found nothing");
        ensure!(workdir.as_deref() != Some(""), "--workdir: expected a folder, found nothing");
        let egress = if args.allow.is_empty() { None } else { Some(egress(args)?) };
        let mut spec = spec(args, limit)?;
        spec.proxy_port = egress.as_ref().map(|_allowed| PROXY_PORT);
        Ok(Self { spec, command: command.collect::<Result<_, _>>()?, workdir, limit, egress })
    }
}

fn spec(args: &ExecArgs, limit: Duration) -> anyhow::Result<SandboxSpec> {
    let mut spec = SandboxSpec::new(PathBuf::new());
    spec.fakeroot = args.fakeroot;
    spec.network = if args.network == "host" { Network::Host } else { Network::None };
    spec.binds = args.bind.iter().map(|bind| parse_bind(bind)).collect::<Result<_, _>>()?;
    if let Some(path) = &args.env_file {
        let variables = fs::read(path).map_err(anyhow::Error::from).and_then(|text| parse_env_file(&text));
        spec.env = variables.with_context(|| format!("--env-file {}", path.display()))?;
    }
    for variable in &args.env {
        spec.env.push(parse_variable(variable.as_bytes()).context("--env")?);
    }
    let mut spec = args.limits.settle()?.applied(spec);
    if let Some(name) = &args.hostname {
        spec.hostname = utf8("--hostname", name)?;
    }
    spec.max_life = limit.saturating_add(LIFE_MARGIN);
    Ok(spec)
}

/// Reads which hosts may be reached, and by which way.
fn egress(args: &ExecArgs) -> anyhow::Result<(Rules, EgressConfig)> {
    const PRIVATE: &str = "PRORL_EGRESS_PRIVATE";
    const PROXY: &str = "PRORL_EGRESS_PROXY";
    // They are set for whole machines, where most commands reach nothing; so they are read here, and not by the flags' own means, which
    // would ask for an --allow.
    let (private, private_key) = match (args.egress_private.is_empty(), variable(PRIVATE)?) {
        (true, Some(hosts)) => (hosts.split(',').map(str::to_owned).collect(), PRIVATE),
        _ => (args.egress_private.clone(), "--egress-private"),
    };
    let (proxy, proxy_key) = match &args.egress_proxy {
        None => (variable(PROXY)?.map(ProxyUrl::from), PROXY),
        given => (given.clone(), "--egress-proxy"),
    };
    let config = crate::egress::config(&private, proxy.as_ref(), [private_key, proxy_key])?;
    let rules = Rules::parse(&args.allow).map_err(|error| anyhow!("--allow: {error}"))?.named("--allow");
    config.check(&rules).map_err(|error| anyhow!("--allow: {error}"))?;
    Ok((rules, config))
}

/// Returns a variable of this process, unless it is absent or empty.
fn variable(name: &str) -> anyhow::Result<Option<String>> {
    let value = std::env::var_os(name).filter(|value| !value.is_empty());
    // It may hold a password, and is not shown.
    value.map(|value| value.into_string().map_err(|_odd| anyhow!("{name}: its value is not UTF-8"))).transpose()
}

fn limit(seconds: Option<f64>) -> anyhow::Result<Duration> {
    let Some(seconds) = seconds else { return Ok(Duration::MAX) };
    let limit = Duration::try_from_secs_f64(seconds).ok();
    limit.filter(|limit| !limit.is_zero() && *limit <= MAX_TIMEOUT).with_context(|| {
        format!("--timeout: expected seconds above 0 and at most {}, found {seconds:?}", MAX_TIMEOUT.as_secs())
    })
}

/// Returns an argument as the text that it has to be.
fn utf8(what: impl Display, given: &OsStr) -> anyhow::Result<String> {
    let text = given.to_str();
    let text = text.with_context(|| format!("{what}: \"{}\" is not UTF-8", given.as_bytes().escape_ascii()))?;
    Ok(text.to_owned())
}

/// Takes `SRC:DST[:ro]` apart. Only the last colon before a slash counts, so that a source may hold colons.
fn parse_bind(given: &OsStr) -> anyhow::Result<Bind> {
    let text = given.as_bytes();
    let (text, writable) = text.strip_suffix(b":ro").map_or((text, true), |text| (text, false));
    let at = text.windows(2).rposition(|pair| pair == b":/");
    let at = at.filter(|at| *at > 0);
    let at = at.with_context(|| format!("--bind {}: expected SRC:DST[:ro] with an absolute DST", given.display()))?;
    let path = |bytes| Path::new(OsStr::from_bytes(bytes));
    let source = std::path::absolute(path(&text[..at])).with_context(|| format!("--bind {}", given.display()))?;
    Ok(Bind { source, target: path(&text[at + 1..]).to_owned(), writable })
}

fn parse_variable(given: &[u8]) -> anyhow::Result<(String, String)> {
    // What has no '=' may be a secret all the same.
    let at = given.iter().position(|byte| *byte == b'=').context("expected NAME=VALUE, found no '='")?;
    let (name, value) = (&given[..at], &given[at + 1..]);
    ensure!(!name.is_empty(), "expected NAME=VALUE, found no name");
    let name = str::from_utf8(name).map_err(|_| anyhow!("the name \"{}\" is not UTF-8", name.escape_ascii()))?;
    ensure!(!name.contains(char::is_control), "the name {name:?} holds a line break or another control character");
    ensure!(
        given.len() <= MAX_VARIABLE_BYTES,
        "{name} and its value have {} bytes; the system passes at most {MAX_VARIABLE_BYTES} in one variable",
        given.len()
    );
    let value = str::from_utf8(value).map_err(|_| anyhow!("the value of {name} is not UTF-8"))?;
    ensure!(!value.contains('\0'), "the value of {name} holds a NUL byte");
    Ok((name.to_owned(), value.to_owned()))
}

fn parse_env_file(text: &[u8]) -> anyhow::Result<Vec<(String, String)>> {
    text.split(|byte| *byte == b'\n')
        .map(|line| line.strip_suffix(b"\r").unwrap_or(line))
        .enumerate()
        .filter(|(_, line)| !line.trim_ascii().is_empty() && !line.starts_with(b"#"))
        .map(|(idx, line)| parse_variable(line).with_context(|| format!("line {}", idx + 1)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bind(text: &str) -> Option<(String, String, bool)> {
        let bind = parse_bind(OsStr::new(text)).ok()?;
        Some((bind.source.to_str().unwrap().to_owned(), bind.target.to_str().unwrap().to_owned(), bind.writable))
    }

    #[test]
    fn a_bind_may_have_colons_in_its_source() {
        let expect = |source: &str, target: &str, writable| Some((source.to_owned(), target.to_owned(), writable));
        assert_eq!(bind("/a:/b"), expect("/a", "/b", true));
        assert_eq!(bind("/a:/b:ro"), expect("/a", "/b", false));
        assert_eq!(bind("/a:b:c:/d"), expect("/a:b:c", "/d", true));
        assert_eq!(bind("/a:/b:/c:ro"), expect("/a:/b", "/c", false));
        let here = std::env::current_dir().unwrap();
        assert_eq!(bind("a:/b"), expect(here.join("a").to_str().unwrap(), "/b", true));
        for wrong in ["", "/a", "/a:b", ":/b", "/a:ro"] {
            assert_eq!(bind(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn variables_are_taken_as_they_stand_and_never_told() {
        let text = "# a comment\nA=1\r\n\nB= two = \"2\" \nC=\nÄ=ä";
        let expected = [("A", "1"), ("B", " two = \"2\" "), ("C", ""), ("Ä", "ä")];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(parse_env_file(text.as_bytes()).unwrap(), expected);
        let long = [b"LONG=s3cret".as_slice(), &vec![b'x'; MAX_VARIABLE_BYTES]].concat();
        for (wrong, word) in [
            (b"A=1\ns3cret".as_slice(), "line 2: expected NAME=VALUE, found no '='"),
            (b"\n\n=s3cret", "line 3: expected NAME=VALUE, found no name"),
            (b"A=s3cret\xff", "line 1: the value of A is not UTF-8"),
            (b"A=s3cret\0", "line 1: the value of A holds a NUL byte"),
            (b"A\xff=s3cret", "line 1: the name \"A\\xff\" is not UTF-8"),
            (b"A\0=s3cret", "line 1: the name \"A\\0\" holds"),
            (&long, "line 1: LONG and its value have 131082 bytes; the system passes at most 131071"),
        ] {
            let error = format!("{:#}", parse_env_file(wrong).unwrap_err());
            assert!(error.starts_with(word) && !error.contains("s3cret"), "{error}");
        }
        let error = parse_variable(b"A\nB=s3cret").unwrap_err().to_string();
        assert_eq!(error, "the name \"A\\nB\" holds a line break or another control character");
    }

    #[test]
    fn a_limit_is_a_time() {
        assert_eq!(limit(None).unwrap(), Duration::MAX);
        assert_eq!(limit(Some(1.5)).unwrap(), Duration::from_millis(1500));
        assert_eq!(limit(Some(MAX_TIMEOUT.as_secs_f64())).unwrap(), MAX_TIMEOUT);
        for wrong in [0.0, -1.0, 3_153_600_001.0, 1e30, f64::NAN, f64::INFINITY] {
            let error = limit(Some(wrong)).unwrap_err().to_string();
            assert!(error.contains(&format!("at most 3153600000, found {wrong:?}")), "{error}");
        }
    }
}
