//! `prorl serve`.

use std::{
    num::NonZeroUsize,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, bail};
use clap::{ArgMatches, builder::BoolishValueParser};
use futures_util::future::try_join_all;
use nix::unistd::geteuid;
use prorl_agents::{CallLimits, EgressPolicy, PathPolicy, runtimes::HOST_IMAGE};
use prorl_core::{
    Secret,
    request::{InputIds, RuntimeChoice},
};
use prorl_llm::pool::{BackendSpec, Policy, PoolConfig};
use prorl_pipeline::{OnDisconnect, PipelineConfig};
use prorl_server::{Listen, ServerConfig};

use crate::{
    config::{Layers, Source},
    egress::{self, ProxyUrl},
    limits::{ServedLimits, free_mib},
    output,
    sandboxes::SandboxConfig,
    stop::Signals,
    stores::{ServedStore, StoreArgs, parse_size},
    wiring::{self, Parts, Service},
};

/// Arguments of `prorl serve`. Each may also be set by its `PRORL_*` variable or in the configuration file.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Configuration file (TOML); its keys are the flags' names with underscores.
    #[arg(long, env = "PRORL_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print every value and where it came from, and end.
    #[arg(long)]
    print_config: bool,
    /// Where to listen: `ADDR:PORT` or `unix:PATH`.
    #[arg(long, env = "PRORL_LISTEN", value_name = "ADDRESS")]
    listen: Option<String>,
    /// Host to listen on, beside --port.
    #[arg(long, env = "PRORL_HOST", value_name = "ADDR")]
    host: Option<String>,
    /// Port to listen on.
    #[arg(long, env = "PRORL_PORT")]
    port: Option<u16>,
    /// File that holds the bearer token; `PRORL_TOKEN` may hold the token itself.
    #[arg(long, env = "PRORL_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Listen off loopback without a token.
    #[arg(long, env = "PRORL_INSECURE_NO_AUTH", num_args = 0..=1, default_missing_value = "true", value_parser = BoolishValueParser::new())]
    insecure_no_auth: Option<bool>,
    /// Take jobs only after POST /start.
    #[arg(long, env = "PRORL_MANUAL_START", num_args = 0..=1, default_missing_value = "true", value_parser = BoolishValueParser::new())]
    manual_start: Option<bool>,
    /// Jobs inside init at once [default: 64].
    #[arg(long, env = "PRORL_MAX_INIT_WORKERS", value_name = "N")]
    max_init_workers: Option<usize>,
    /// Jobs inside run at once [default: 64].
    #[arg(long, env = "PRORL_MAX_RUN_WORKERS", value_name = "N")]
    max_run_workers: Option<usize>,
    /// Jobs inside eval at once [default: as run].
    #[arg(long, env = "PRORL_MAX_EVAL_WORKERS", value_name = "N")]
    max_eval_workers: Option<usize>,
    /// Counted time of a job that names none, seconds [default: 300].
    #[arg(long, env = "PRORL_TIMEOUT", value_name = "SECONDS")]
    timeout: Option<f64>,
    /// Let an instance skip its scoring with `"skip_eval": true`.
    #[arg(long, env = "PRORL_ALLOW_SKIP_EVAL", num_args = 0..=1, default_missing_value = "true", value_parser = BoolishValueParser::new())]
    allow_skip_eval: Option<bool>,
    /// Jobs that may wait for their first worker [default: 65536].
    #[arg(long, env = "PRORL_QUEUE_LIMIT", value_name = "N")]
    queue_limit: Option<usize>,
    /// What happens to a job whose last waiting client leaves: cancel or keep [default: cancel].
    #[arg(long, env = "PRORL_ON_DISCONNECT", value_parser = ["cancel", "keep"])]
    on_disconnect: Option<String>,
    /// What `input_ids` of an assistant message holds: delta, full or none [default: delta].
    #[arg(long, env = "PRORL_INPUT_IDS", value_parser = ["delta", "full", "none"])]
    input_ids: Option<String>,
    /// Kind of sandbox of instances that say `auto` or nothing; auto is namespace [default: auto].
    #[arg(long, env = "PRORL_RUNTIME", value_parser = ["auto", "namespace", "singularity"])]
    runtime: Option<String>,
    /// Image of instances that name none: a name of the store, an unpacked folder, a .sif or a squashfs [default: the host's own
    /// programs].
    #[arg(long, env = "PRORL_IMAGE", value_name = "IMAGE")]
    image: Option<PathBuf>,
    /// Folder of the store of images, or `none` for no store, in which case packed images take Apptainer [default: prorl/store in
    /// `XDG_DATA_HOME` or ~/.local/share; for root, where that is closed to other users, /var/lib/prorl/store].
    #[arg(long, env = "PRORL_STORE", value_name = "DIR")]
    store: Option<PathBuf>,
    /// Remove images that nobody uses from the store, the one unused for longest first, while it is larger than this, such as 50G
    /// [default: nothing is removed].
    #[arg(long, env = "PRORL_STORE_MAX", value_name = "SIZE")]
    store_max: Option<String>,
    /// The apptainer or singularity program [default: looked for along PATH].
    #[arg(long, env = "PRORL_APPTAINER", value_name = "PATH")]
    apptainer: Option<PathBuf>,
    /// Local folder for what the sandboxes of this machine need while they live [default: prorl-UID in TMPDIR].
    #[arg(long, env = "PRORL_RUN_DIR", value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Sandboxes that may start at the same time [default: twice the processors, 4 at least].
    #[arg(long, env = "PRORL_MAX_STARTING", value_name = "N")]
    max_starting: Option<usize>,
    /// Control groups of sandboxes: `auto` for those that are delegated to this process, if any; `off`; or an empty folder of the
    /// hierarchy that belongs to this user [default: auto].
    #[arg(long, env = "PRORL_CGROUP", value_name = "auto|off|DIR")]
    cgroup: Option<PathBuf>,
    /// Memory that stays free: less, and no further sandbox starts, in MiB [default: 2 % of the machine's, 256 to 2048].
    #[arg(long, env = "PRORL_MIN_FREE_MEMORY_MB", value_name = "N", value_parser = free_mib)]
    min_free_memory_mb: Option<u64>,
    /// Disk that stays free where --run-dir is: less, and no further sandbox starts, in MiB [default: 64].
    #[arg(long, env = "PRORL_MIN_FREE_DISK_MB", value_name = "N", value_parser = free_mib)]
    min_free_disk_mb: Option<u64>,
    /// Number of the host user that sandboxes are mapped to; for root only. Apptainer needs one that /etc/passwd knows
    /// [default: that of nobody].
    #[arg(long, env = "PRORL_SANDBOX_USER", value_name = "UID")]
    sandbox_user: Option<u32>,
    /// Tokenizer folder of the policy [default: the built-in small one, which fits mock-llm only].
    #[arg(long, env = "PRORL_TOKENIZER", value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// Folder below which requests may name tokenizers and images; may be given again.
    #[arg(long, env = "PRORL_ALLOW_PATH", value_name = "DIR", value_delimiter = ':')]
    allow_path: Option<Vec<PathBuf>>,
    /// Let an instance ask for the host's network; needs a token or a unix listener.
    #[arg(long, env = "PRORL_ALLOW_HOST_NETWORK", num_args = 0..=1, default_missing_value = "true", value_parser = BoolishValueParser::new())]
    allow_host_network: Option<bool>,
    /// Let an instance reach hosts that it names, through this server [default: true].
    #[arg(long, env = "PRORL_EGRESS", num_args = 0..=1, default_missing_value = "true", value_parser = BoolishValueParser::new())]
    egress: Option<bool>,
    /// Host that instances may name although its address is private, such as a mirror in the cluster; may be given again.
    #[arg(long, env = "PRORL_EGRESS_PRIVATE", value_name = "HOST[:PORT]", value_delimiter = ',')]
    egress_private: Option<Vec<String>>,
    /// HTTP proxy of the cluster by which this server reaches those hosts, as HOST:PORT or USER:PASSWORD@HOST:PORT; other users of
    /// this machine can see an argument, so a password belongs into the variable or the file [default: directly].
    #[arg(long, env = "PRORL_EGRESS_PROXY", hide_env_values = true, value_name = "URL")]
    egress_proxy: Option<ProxyUrl>,
    /// LLM server to add at start; may be given again.
    #[arg(long, env = "PRORL_LLM", value_name = "URL", value_delimiter = ',')]
    llm: Option<Vec<String>>,
    /// How jobs choose a backend: active or assigned [default: active].
    #[arg(long, env = "PRORL_POLICY", value_parser = ["active", "assigned"])]
    policy: Option<String>,
    /// How long a job may wait for a backend, seconds; 0 refuses jobs while there is none [default: 3600].
    #[arg(long, env = "PRORL_WAIT_FOR_LLM", value_name = "SECONDS")]
    wait_for_llm: Option<f64>,
    /// One LLM call, seconds; also held to four fifths of its job's time [default: 600].
    #[arg(long, env = "PRORL_LLM_TIMEOUT", value_name = "SECONDS")]
    llm_timeout: Option<f64>,
    /// One tool call, seconds [default: 120].
    #[arg(long, env = "PRORL_TOOL_TIMEOUT", value_name = "SECONDS")]
    tool_timeout: Option<f64>,
    /// One bash call without output, seconds [default: 30].
    #[arg(long, env = "PRORL_BASH_SILENCE", value_name = "SECONDS")]
    bash_silence: Option<f64>,
    #[command(flatten)]
    sandbox_limits: ServedLimits,
}

/// What the arguments come to.
struct Settings {
    listen: Listen,
    parts: Parts,
    manual_start: bool,
    llm: Vec<String>,
    report: String,
}

fn seconds(key: &str, value: f64) -> anyhow::Result<Duration> {
    Duration::try_from_secs_f64(value)
        .ok()
        .filter(|_| value >= 0.0)
        .with_context(|| format!("{key}: expected seconds, found {value}"))
}

fn above_zero(key: &str, value: usize) -> anyhow::Result<usize> {
    if value == 0 {
        bail!("{key}: expected a number above 0, found 0")
    }
    Ok(value)
}

fn settle(args: Args, given: &ArgMatches) -> anyhow::Result<Settings> {
    let mut layers = Layers::new(given, args.config.as_deref())?;
    let listen = layers.optional("listen", args.listen)?;
    let host = layers.or("host", args.host, "127.0.0.1".to_owned())?;
    let port = layers.or("port", args.port, 8006)?;
    // Two ways to say one thing: the one that was said closer to the command wins.
    let of_parts = layers.source("host").max(layers.source("port"));
    let listen = match listen {
        Some(_) if of_parts == Source::Flag && layers.source("listen") == Source::Flag => {
            bail!("--listen goes without --host and --port");
        }
        Some(listen) if layers.source("listen") >= of_parts => listen,
        _ if host.contains(':') && !host.starts_with('[') => format!("[{host}]:{port}"),
        _ => format!("{host}:{port}"),
    };
    let listen: Listen = listen.parse()?;
    let token_file = layers.optional("token_file", args.token_file)?;
    let token = match token_file {
        Some(path) => {
            let text = std::fs::read_to_string(&path)
                .with_context(|| format!("failed to read the token file {}", path.display()))?;
            Some(text.trim().to_owned())
        }
        None => std::env::var("PRORL_TOKEN").ok(),
    };
    if token.as_ref().is_some_and(String::is_empty) {
        bail!("the bearer token is empty");
    }
    let insecure_no_auth = layers.or("insecure_no_auth", args.insecure_no_auth, false)?;
    let manual_start = layers.or("manual_start", args.manual_start, false)?;

    let run_workers = layers.or("max_run_workers", args.max_run_workers, 64)?;
    let timeout = layers.or("timeout", args.timeout, 300.0)?;
    let default_timeout = seconds("timeout", timeout)?;
    if default_timeout.is_zero() {
        bail!("timeout: expected seconds above 0, found 0");
    }
    let pipeline = PipelineConfig {
        init_workers: above_zero("max_init_workers", layers.or("max_init_workers", args.max_init_workers, 64)?)?,
        run_workers: above_zero("max_run_workers", run_workers)?,
        eval_workers: above_zero(
            "max_eval_workers",
            layers.or("max_eval_workers", args.max_eval_workers, run_workers)?,
        )?,
        queue_limit: above_zero("queue_limit", layers.or("queue_limit", args.queue_limit, 65_536)?)?,
        default_timeout,
        on_disconnect: match layers.or("on_disconnect", args.on_disconnect, "cancel".to_owned())?.as_str() {
            "cancel" => OnDisconnect::Cancel,
            "keep" => OnDisconnect::Keep,
            other => bail!("on_disconnect: expected cancel or keep, found {other}"),
        },
        allow_skip_eval: layers.or("allow_skip_eval", args.allow_skip_eval, false)?,
        ..PipelineConfig::default()
    };
    let default_input_ids = match layers.or("input_ids", args.input_ids, "delta".to_owned())?.as_str() {
        "delta" => InputIds::Delta,
        "full" => InputIds::Full,
        "none" => InputIds::None,
        other => bail!("input_ids: expected delta, full or none, found {other}"),
    };
    let runtime = match layers.or("runtime", args.runtime, "auto".to_owned())?.as_str() {
        "auto" => RuntimeChoice::Auto,
        "namespace" => RuntimeChoice::Namespace,
        "singularity" => RuntimeChoice::Singularity,
        other => bail!("runtime: expected auto, namespace or singularity, found {other}"),
    };
    let image = match layers.optional("image", args.image)?.filter(|image| image != Path::new(HOST_IMAGE)) {
        // Anything else may be a name of the store, which is not open yet.
        Some(path) if path.is_absolute() || path.starts_with(".") || path.starts_with("..") => {
            Some(path.canonicalize().with_context(|| format!("image: {} cannot be opened", path.display()))?)
        }
        Some(name) => Some(name),
        None if runtime == RuntimeChoice::Singularity => {
            tracing::warn!(
                "no --image is given, and the singularity runtime has none of its own: each instance has to name one"
            );
            None
        }
        None => None,
    };
    let store_max = layers.optional("store_max", args.store_max)?;
    let store = ServedStore {
        args: StoreArgs { store: layers.optional("store", args.store)? },
        max_bytes: store_max
            .map(|size| parse_size(&size).map_err(|problem| anyhow::anyhow!("store_max: {problem}")))
            .transpose()?,
    };
    let sandbox_user = layers.optional("sandbox_user", args.sandbox_user)?;
    if sandbox_user.is_some() && !geteuid().is_root() {
        bail!("sandbox_user: only root can choose another user than itself for sandboxes");
    }
    let max_starting = layers.optional("max_starting", args.max_starting)?;
    let max_starting = max_starting.map(|number| above_zero("max_starting", number)).transpose()?;
    let sandboxes = SandboxConfig {
        run_dir: layers.optional("run_dir", args.run_dir)?,
        sandbox_user,
        apptainer: layers.optional("apptainer", args.apptainer)?,
        max_starting: max_starting.and_then(NonZeroUsize::new),
        cgroup: layers.optional("cgroup", args.cgroup)?,
        min_free_memory_mb: layers.optional("min_free_memory_mb", args.min_free_memory_mb)?,
        min_free_disk_mb: layers.optional("min_free_disk_mb", args.min_free_disk_mb)?,
    };
    sandboxes.groups().map_err(|problem| anyhow::anyhow!("{}: {problem}", layers.name("cgroup")))?;
    let tokenizer = layers.optional("tokenizer", args.tokenizer)?;
    let allow_path = layers.or("allow_path", args.allow_path, Vec::new())?;
    let allow_host_network = layers.or("allow_host_network", args.allow_host_network, false)?;
    let is_open = layers.or("egress", args.egress, true)?;
    let private = layers.or("egress_private", args.egress_private, Vec::new())?;
    let proxy = layers.optional("egress_proxy", args.egress_proxy)?;
    if !is_open && (!private.is_empty() || proxy.is_some()) {
        let key = if private.is_empty() { "egress_proxy" } else { "egress_private" };
        bail!("{key} is given and egress is false, so that nothing would use it; leave out one of the two");
    }
    let config = egress::config(&private, proxy.as_ref(), ["egress_private", "egress_proxy"])?;
    let egress = EgressPolicy { enabled: is_open, config };
    let llm = layers.or("llm", args.llm, Vec::new())?;
    let policy = match layers.or("policy", args.policy, "active".to_owned())?.as_str() {
        "active" => Policy::Active,
        "assigned" => Policy::Assigned,
        other => bail!("policy: expected active or assigned, found {other}"),
    };
    let wait_for_llm = seconds("wait_for_llm", layers.or("wait_for_llm", args.wait_for_llm, 3600.0)?)?;
    let limits = CallLimits {
        llm_call: seconds("llm_timeout", layers.or("llm_timeout", args.llm_timeout, 600.0)?)?,
        tool_total: seconds("tool_timeout", layers.or("tool_timeout", args.tool_timeout, 120.0)?)?,
        bash_silence: seconds("bash_silence", layers.or("bash_silence", args.bash_silence, 30.0)?)?,
        backend_wait: wait_for_llm,
        ..CallLimits::default()
    };
    let sandbox_limits = args.sandbox_limits.settle(&mut layers)?;
    let report = format!("{}\n# listens on {listen}", layers.finish()?);

    if allow_host_network && token.is_none() && !listen.is_unix() {
        bail!("allow_host_network needs a token or a unix listener: code in such a sandbox could call this API");
    }
    let trusted = listen.is_unix() || listen.is_loopback();
    let paths = if allow_path.is_empty() && trusted { PathPolicy::Any } else { PathPolicy::Below(allow_path) };
    let server = ServerConfig {
        token: token.map(Secret::new),
        insecure_no_auth,
        wait_for_llm: Some(wait_for_llm),
        default_input_ids,
        ..ServerConfig::default()
    };
    let parts = Parts {
        pipeline,
        pool: PoolConfig { policy, ..PoolConfig::default() },
        server,
        sandboxes,
        runtime,
        image,
        store: Some(store),
        tokenizer: wiring::tokenizer(tokenizer.as_deref())?,
        limits,
        sandbox_limits,
        paths,
        allow_host_network,
        egress,
    };
    if tokenizer.is_none() {
        tracing::warn!("no tokenizer is given: the built-in one fits mock-llm only");
    }
    Ok(Settings { listen, parts, manual_start, llm, report })
}

pub(crate) async fn main(args: Args, given: &ArgMatches) -> anyhow::Result<ExitCode> {
    let print_only = args.print_config;
    let settings = match settle(args, given) {
        Ok(settings) => settings,
        Err(err) => return Ok(output::usage(format_args!("{err:#}"))),
    };
    if print_only {
        output::say(settings.report);
        return Ok(ExitCode::SUCCESS);
    }
    let mut signals = Signals::take()?;
    let mut service = Service::start(settings.listen, settings.parts).await?;
    let adding = try_join_all(settings.llm.iter().map(|address| {
        let pool = service.pool.clone();
        async move {
            let added = pool.add(BackendSpec::new(address)).await;
            added.with_context(|| format!("LLM server {address} cannot be used"))
        }
    }));
    let added = tokio::select! {
        added = adding => added,
        signal = signals.next() => Err(anyhow::anyhow!("ended by {signal}")),
    };
    if let Err(error) = added {
        service.stop().await?;
        return Err(error);
    }
    if !settings.manual_start {
        service.pipeline.start();
    }
    output::say(format_args!("prorl serve listening on {}", service.address));
    tokio::select! {
        signal = signals.next() => tracing::info!(signal, "stopping"),
        error = service.broken() => {
            service.stop().await?;
            return Err(error);
        }
    }
    tokio::select! {
        stopped = service.stop() => stopped.map(|()| ExitCode::SUCCESS),
        // Asked twice: the process goes at once, and each sandbox ends with its channel.
        _ = signals.next() => Ok(ExitCode::FAILURE),
    }
}
