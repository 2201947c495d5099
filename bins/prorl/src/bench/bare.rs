//! The tools that others would use in our place, run bare.

use std::{
    ffi::OsString,
    fs,
    io::{self, Write as _},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, bail};
use prorl_guest::VERSION_FLAG;
use prorl_sandbox::SingularityRuntime;
use tokio::{
    io::AsyncReadExt,
    process::Command,
    time::{Instant, timeout},
};

use super::machine;

/// Longer than any tool takes.
const LIMIT: Duration = Duration::from_mins(1);

/// A folder that bubblewrap and Apptainer can take our static guest from: they need a file with a name.
pub(super) struct Folder {
    folder: tempfile::TempDir,
}

impl Folder {
    /// Makes it; it is removed when dropped.
    pub(super) fn make() -> io::Result<Self> {
        let folder = tempfile::Builder::new().prefix("prorl-bench-").tempdir()?;
        open(folder.path())?;
        let image = folder.path().join("image");
        for name in ["bin", "dev", "etc", "home", "proc", "root", "sys", "tmp", "usr", "var/tmp"] {
            fs::create_dir_all(image.join(name))?;
        }
        // Apptainer shows the host's own there, and complains about an image that lacks them.
        for name in ["etc/group", "etc/hosts", "etc/localtime", "etc/passwd", "etc/resolv.conf"] {
            fs::write(image.join(name), "")?;
        }
        let made = Self { folder };
        for program in [made.guest(), image.join("bin/prorl-guest")] {
            fs::File::create(&program)?.write_all(prorl_guest::bytes())?;
            open(&program)?;
        }
        Ok(made)
    }

    /// The static program.
    pub(super) fn guest(&self) -> PathBuf {
        self.folder.path().join("guest")
    }

    /// A directory image that holds it, as `/bin/prorl-guest`, and nothing else.
    pub(super) fn image(&self) -> PathBuf {
        self.folder.path().join("image")
    }
}

/// Lets every user in, as the one that sandboxes of root run as.
fn open(path: &Path) -> io::Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
}

/// What it took a bare tool to run the guest once, for its version.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// To the first byte of its output.
    pub(super) start: Duration,
    /// To the end of the tool.
    pub(super) whole: Duration,
}

/// A tool with the arguments that make the kind of sandbox we make, and run the guest in it.
pub(super) struct Tool {
    /// What the tool says of its version.
    pub(super) version: String,
    program: PathBuf,
    args: Vec<OsString>,
}

impl Tool {
    /// bubblewrap with every namespace of its own; the root is the host's programs, or a directory image, read-only.
    ///
    /// It does less than our runtime: no writable layer over the programs, no system call filter, no limits, no channel.
    pub(super) async fn bwrap(guest: &Path, image: Option<&Path>) -> anyhow::Result<Self> {
        let mut args = words("--unshare-all --die-with-parent --new-session --clearenv --hostname sandbox");
        let host = ["bin", "lib", "lib32", "lib64", "libx32", "sbin", "usr"].map(OsString::from).to_vec();
        let (root, names) = match image {
            None => (Path::new("/"), host),
            Some(image) => (image, names_in(image)?),
        };
        for name in names {
            let (source, target) = (root.join(&name), Path::new("/").join(&name));
            if let Ok(link) = fs::read_link(&source) {
                args.extend(["--symlink".into(), link.into(), target.into()]);
            } else if source.exists() {
                args.extend(["--ro-bind".into(), source.into(), target.into()]);
            }
        }
        args.extend(words("--proc /proc --dev /dev --tmpfs /tmp --tmpfs /workspace --ro-bind"));
        args.extend([guest.into(), "/guest".into()]);
        args.extend(words("--chdir /workspace -- /guest"));
        args.push(VERSION_FLAG.into());
        Self::found(&["bwrap"], args).await
    }

    /// Apptainer as our Singularity runtime calls it, without our runtime; where there is no such runtime, as others would.
    pub(super) async fn apptainer(
        folder: &Folder,
        runtime: Option<&SingularityRuntime>,
        image: &Path,
    ) -> anyhow::Result<Self> {
        let guest = folder.guest();
        let mut args = words("--quiet");
        if let Some(text) = runtime.and_then(SingularityRuntime::conf) {
            let conf = folder.folder.path().join("launcher.conf");
            fs::write(&conf, text)?;
            args.extend(["--config".into(), conf.into()]);
        }
        args.push("exec".into());
        match runtime {
            Some(runtime) => args.extend(runtime.flags().into_iter().map(OsString::from)),
            None => args
                .extend(words("--userns --containall --cleanenv --no-init --no-home --no-umask --net --network none")),
        }
        args.extend(words("--pwd / --bind"));
        let mut bind = guest.as_os_str().to_owned();
        bind.push(":/.prorl/guest:ro");
        args.extend([bind, image.into(), "/.prorl/guest".into(), VERSION_FLAG.into()]);
        Self::found(&["apptainer", "singularity"], args).await
    }

    /// Looks for the tool and tries it once.
    async fn found(names: &[&str], args: Vec<OsString>) -> anyhow::Result<Self> {
        let Some(program) = names.iter().find_map(|name| machine::find_program(name)) else {
            bail!("{} is absent", names[0]);
        };
        let mut tool = Self { version: String::new(), program, args: words("--version") };
        let (version, _) = tool.output().await?;
        version.trim().clone_into(&mut tool.version);
        tool.args = args;
        tool.run().await?;
        Ok(tool)
    }

    /// Runs the guest in it once.
    pub(super) async fn run(&self) -> anyhow::Result<Run> {
        Ok(self.output().await?.1)
    }

    async fn output(&self) -> anyhow::Result<(String, Run)> {
        let name = self.program.display();
        let mut command = Command::new(&self.program);
        command
            .args(&self.args)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", "/")
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        if let Some((uid, gid)) = machine::sandbox_user() {
            command.uid(uid).gid(gid);
        }
        let begun = Instant::now();
        let mut child = command.spawn().with_context(|| format!("failed to start {name}"))?;
        let (mut stdout, mut stderr) =
            (child.stdout.take().expect("it is piped"), child.stderr.take().expect("it is piped"));
        let ran = timeout(LIMIT, async {
            let (mut said, mut complaint) = (vec![0; 256], String::new());
            let n_bytes = stdout.read(&mut said).await?;
            let start = begun.elapsed();
            said.truncate(n_bytes);
            // One after the other is enough: neither says more than a pipe holds.
            stdout.read_to_end(&mut said).await?;
            stderr.read_to_string(&mut complaint).await?;
            let status = child.wait().await?;
            io::Result::Ok((said, complaint, status, Run { start, whole: begun.elapsed() }))
        });
        let (said, complaint, status, run) = ran.await.with_context(|| format!("{name} did not end"))??;
        if !status.success() || said.is_empty() {
            bail!("{name} failed ({status}): {}", complaint.trim());
        }
        Ok((String::from_utf8_lossy(&said).into_owned(), run))
    }
}

fn words(text: &str) -> Vec<OsString> {
    text.split_whitespace().map(OsString::from).collect()
}

/// What a directory image has at its top, but for what every sandbox has of its own.
fn names_in(image: &Path) -> anyhow::Result<Vec<OsString>> {
    let entries = fs::read_dir(image).with_context(|| format!("failed to read {}", image.display()))?;
    let names: Vec<OsString> = entries.map(|entry| Ok(entry?.file_name())).collect::<io::Result<_>>()?;
    let own = ["dev", "proc", "sys", "tmp", "workspace"];
    Ok(names.into_iter().filter(|name| !own.iter().any(|own| name == own)).collect())
}
