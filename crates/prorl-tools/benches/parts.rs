//! The parts of a tool call that the host computes: frames, text for the model, and the check of arguments.

#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use prorl_core::frame;
use prorl_tools::{
    host::clean,
    schema::{execute_bash, str_replace_editor},
    wire::{Bash, Bytes, GuestFrame, HostFrame, Op, Request, Stream},
};
use serde_json::json;

/// What one answer of a shell has at most.
const OUTPUT_BYTES: usize = 128 << 10;

fn frames(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("frame");
    let op = Op::Bash(Bash {
        session: "main".to_owned(),
        command: "grep -rn error src".to_owned(),
        is_input: false,
        silence_ms: 30_000,
    });
    let request = HostFrame::Request(Request { id: 7, timeout_ms: 60_000, op });
    group.bench_function("encode a command", |bencher| bencher.iter(|| frame::encode(black_box(&request))));
    let output = GuestFrame::Output { id: 7, stream: Stream::Stdout, bytes: Bytes(vec![b'x'; OUTPUT_BYTES]) };
    let bytes = frame::encode(&output).expect("it is below the limit of a frame");
    group.throughput(Throughput::Bytes(OUTPUT_BYTES as u64));
    group.bench_function("encode 128 KiB", |bencher| bencher.iter(|| frame::encode(black_box(&output))));
    group.bench_function("decode 128 KiB", |bencher| {
        bencher.iter(|| frame::decode::<GuestFrame>(black_box(&bytes[frame::HEADER_BYTES..])));
    });
    group.finish();
}

fn texts(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("clean");
    group.throughput(Throughput::Bytes(OUTPUT_BYTES as u64));
    for (name, piece) in [
        ("plain", "The quick brown fox jumps over the lazy dog.\n"),
        ("coloured", "\x1b[1;32mok\x1b[0m test::name of a test \x1b[2m(12 ms)\x1b[0m\n"),
        ("progress", "\r 57%|#####     | 57/100 [00:01<00:01, 42.00it/s]"),
    ] {
        let output = piece.repeat(OUTPUT_BYTES / piece.len());
        group.bench_function(name, |bencher| bencher.iter(|| clean(black_box(output.as_bytes()))));
    }
    group.finish();
}

fn arguments(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("check");
    let (bash, editor) = (execute_bash(), str_replace_editor());
    let right = json!({"command": "view", "path": "/workspace/a.py", "view_range": [1, 20]});
    let wrong = json!({"cmd": "ls", "timeout": "soon"});
    for (name, schema, arguments) in [("right", &editor, &right), ("wrong", &bash, &wrong)] {
        let arguments = arguments.as_object().expect("it is an object");
        group.bench_function(name, |bencher| bencher.iter(|| schema.check(black_box(arguments))));
    }
    group.finish();
}

criterion_group!(benches, frames, texts, arguments);
criterion_main!(benches);
