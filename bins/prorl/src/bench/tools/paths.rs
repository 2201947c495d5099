//! A call from end to end: host, channel, guest, terminal, shell, and all the way back; beside the least that can be.

use std::time::Duration;

use anyhow::ensure;
use prorl_tools::{
    host::{BashCall, ToolClient},
    wire::{BashAnswer, BashEnd},
};
use serde::Serialize;
use tokio::time::Instant;

use super::{
    Args,
    live::{CALL_LIMIT, Ground},
    present,
    pty::{Behind, Shell},
    tmux::Tmux,
};
use crate::{
    bench::figures::{Spread, ratio},
    output,
};

/// Calls of one kind before the next one's turn.
const TURN: u32 = 10;

/// What prints much, and how much that is.
const LINES: &str = "seq 1 200000";
const LINES_BYTES: u64 = 1_288_895;

/// Calls of ours beside others'.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    #[serde(rename = "true")]
    pub(super) nothing: Beside,
    pub(super) echo: Beside,
    pub(super) seq_200000: Beside,
}

/// One command, run in turns.
#[derive(Debug, Serialize)]
pub(super) struct Beside {
    pub(super) ours: Option<Spread>,
    /// A terminal that is read to a word, in this process.
    pub(super) pty: Option<Spread>,
    /// The same behind a socket, as a sandbox is.
    pub(super) pty_behind_socket: Option<Spread>,
    pub(super) tmux: Option<Spread>,
    /// p50 by p50.
    pub(super) ours_by_pty: Option<f64>,
    pub(super) ours_by_pty_behind_socket: Option<f64>,
    pub(super) tmux_by_ours: Option<f64>,
}

pub(super) async fn measure(args: &Args, ground: &Ground) -> anyhow::Result<Figures> {
    let live = ground.start().await?;
    let mut others = Others {
        pty: present("pty", Shell::start().map_err(Into::into)),
        behind: present("pty_behind_socket", Behind::start().map_err(Into::into)),
        tmux: present("tmux", Tmux::start()),
    };
    let mut beside = async |command: &'static str, n: u32, n_bytes: u64, with_tmux: bool| {
        let n_tmux = if with_tmux { n.div_ceil(100) } else { 0 };
        others.beside(&live.tools, command, n, n_bytes, n_tmux).await
    };
    let nothing = beside("true", args.n, 0, true).await?;
    let echo = beside("echo hello", args.n, 6, true).await?;
    // It goes through tmux's screen, which keeps fifty lines of it.
    let seq_200000 = beside(LINES, args.n.div_ceil(20), LINES_BYTES, false).await?;
    drop(others);
    live.end().await?;
    Ok(Figures { nothing, echo, seq_200000 })
}

/// Whom we are measured beside, as far as they are there.
struct Others {
    pty: Option<Shell>,
    behind: Option<Behind>,
    tmux: Option<Tmux>,
}

impl Others {
    async fn beside(
        &mut self,
        tools: &ToolClient,
        command: &'static str,
        n: u32,
        n_bytes: u64,
        n_tmux: u32,
    ) -> anyhow::Result<Beside> {
        let bar = output::progress(u64::from(n), command);
        let (mut ours, mut pty, mut behind, mut tmux) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        // The first turn warms up.
        let mut n_done = 0;
        let mut is_warm = false;
        while n_done < n {
            let turn = TURN.min(n - n_done);
            let keep = |times: &mut Vec<Duration>, took: Duration| {
                if is_warm {
                    times.push(took);
                }
            };
            for _ in 0..turn {
                let begun = Instant::now();
                let answer = tools.bash(&BashCall::new(command), CALL_LIMIT).await?;
                keep(&mut ours, begun.elapsed());
                check(command, n_bytes, &answer)?;
            }
            if let Some(shell) = &mut self.pty {
                for _ in 0..turn {
                    let begun = Instant::now();
                    let (output, code) = shell.run(command)?;
                    keep(&mut pty, begun.elapsed());
                    ensure!(output.len() as u64 == n_bytes && code == 0, "pty: {command}: {} bytes", output.len());
                }
            }
            if let Some(shell) = &mut self.behind {
                for _ in 0..turn {
                    let begun = Instant::now();
                    let (output, code) = shell.run(command).await?;
                    keep(&mut behind, begun.elapsed());
                    ensure!(output.len() as u64 == n_bytes && code == 0, "pty: {command}: {} bytes", output.len());
                }
            }
            if let Some(shell) = &mut self.tmux
                && tmux.len() < n_tmux as usize
            {
                let took = shell.run(command)?;
                keep(&mut tmux, took);
            }
            if is_warm {
                n_done += turn;
                bar.inc(u64::from(turn));
            }
            is_warm = true;
        }
        bar.finish_and_clear();
        let [ours, pty, pty_behind_socket, tmux] = [ours, pty, behind, tmux].map(Spread::of);
        let p50 = |spread: &Option<Spread>| spread.as_ref().map(|spread| spread.p50_ms);
        Ok(Beside {
            ours_by_pty: ratio(p50(&ours), p50(&pty)),
            ours_by_pty_behind_socket: ratio(p50(&ours), p50(&pty_behind_socket)),
            tmux_by_ours: ratio(p50(&tmux), p50(&ours)),
            ours,
            pty,
            pty_behind_socket,
            tmux,
        })
    }
}

fn check(command: &str, n_bytes: u64, answer: &BashAnswer) -> anyhow::Result<()> {
    let is_right = answer.end == BashEnd::Exited(0) && answer.output.total == n_bytes;
    ensure!(is_right, "{command}: {:?} and {} bytes, not {n_bytes}", answer.end, answer.output.total);
    Ok(())
}
