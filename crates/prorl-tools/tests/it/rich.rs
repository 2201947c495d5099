//! What a cell shows that is more than text.

use std::{io::Write, time::Duration};

use prorl_tools::{
    host::CellOutput,
    wire::{CellEnd, Interrupt},
};

use crate::{
    guest::{Guest, LONG},
    python::{with_ipython, without_ipython},
};

const PNG: &[u8] = b"\x89PNG\r\n\x1a\n";

async fn show(guest: &Guest, code: &str) -> CellOutput {
    guest.client().ipython(code, LONG).await.unwrap()
}

/// Returns types and places.
fn places(answer: &CellOutput) -> Vec<(&str, u64)> {
    answer.shown.iter().map(|one| (one.mime.as_str(), one.at)).collect()
}

#[tokio::test]
async fn values_come_in_their_types_and_places_with_and_without_ipython() {
    for guest in [Some(without_ipython().await.0), with_ipython().await].iter().flatten() {
        let class = r"
class Value:
    def __repr__(self): return 'text'
    def _repr_html_(self): return '<b>caf\u00e9</b>'
    def _repr_png_(self): return b'\x89PNG\r\n\x1a\n\x00\xff'
class Note:
    def _repr_markdown_(self): return '**bold**'
class Drawing:
    def __repr__(self): return 'drawing'
    def _repr_svg_(self): return '<svg/>'
    def _repr_jpeg_(self): return '/9j/'
class Faulty:
    def __repr__(self): return 'faulty'
    def _repr_html_(self): return None";
        assert_eq!(show(guest, class).await.end, CellEnd::Ok);
        let answer = show(guest, "print('before')\nValue()").await;
        assert_eq!(answer.output.text(), "before\ntext\n");
        assert_eq!(places(&answer), [("text/html", 12), ("image/png", 12)]);
        assert_eq!(answer.shown[0].data, "<b>caf\u{e9}</b>".as_bytes());
        assert_eq!(answer.shown[1].data, b"\x89PNG\r\n\x1a\n\x00\xff");
        // Markdown is text already, and stands for it.
        let answer = show(guest, "Note()").await;
        assert_eq!((answer.output.text().as_str(), places(&answer)), ("", vec![("text/markdown", 0)]));
        // One of several images; in text it is in base64.
        let answer = show(guest, "Drawing()").await;
        assert_eq!((answer.output.text().as_str(), places(&answer)), ("drawing\n", vec![("image/jpeg", 8)]));
        assert_eq!(answer.shown[0].data, b"\xff\xd8\xff");
        let answer = show(guest, "display(Value(), Faulty(), Value); 3").await;
        assert!(answer.output.text().starts_with("text\nfaulty\n") && answer.output.text().ends_with("\n3\n"));
        assert_eq!(places(&answer), [("text/html", 5), ("image/png", 5)]);
        // A cell that fails has shown what it has shown.
        let answer = show(guest, "display(Note()); 1 / 0").await;
        assert_eq!((answer.end.clone(), places(&answer)), (CellEnd::Raised, vec![("text/markdown", 0)]));
    }
}

#[tokio::test]
async fn what_ipython_displays_comes_in_its_type() {
    let Some(guest) = with_ipython().await else { return };
    let answer = show(
        &guest,
        "from IPython.display import *\ndisplay(HTML('<i>x</i>'))\ndisplay(Image(data=b'\\x89PNG\\r\\n\\x1a\\n', format='png'))\nMarkdown('*x*')",
    )
    .await;
    assert_eq!(
        answer.shown.iter().map(|one| (one.mime.as_str(), one.data.as_slice())).collect::<Vec<_>>(),
        [("text/html", b"<i>x</i>".as_slice()), ("image/png", PNG), ("text/markdown", b"*x*")]
    );
    // What is captured is not shown.
    let answer = show(&guest, "%%capture caught\ndisplay(Markdown('*x*'))").await;
    assert_eq!((answer.output.total, answer.shown.len()), (0, 0));
    assert_eq!(show(&guest, "len(caught.outputs)").await.output.text(), "1\n");
}

#[tokio::test]
async fn what_is_too_much_is_told_in_its_place() {
    for guest in [Some(without_ipython().await.0), with_ipython().await].iter().flatten() {
        let class = "class Png:\n    def __init__(self, n): self.n = n\n    def __repr__(self): return str(self.n)\n    def _repr_png_(self): return b'x' * self.n";
        show(guest, class).await;
        let answer = show(guest, "for n in range(35): display(Png(5))").await;
        assert_eq!((answer.shown.len(), answer.shown[31].at), (32, 64));
        assert!(
            answer.output.text().ends_with(&"5\n[image/png, 5 bytes: the cell has shown too much before]\n".repeat(3))
        );
        let answer = show(guest, "for n in (3, 3, 3, 1): display(Png(n << 20))").await;
        let sizes: Vec<usize> = answer.shown.iter().map(|one| one.data.len()).collect();
        assert_eq!(sizes, [3 << 20, 3 << 20]);
        assert_eq!(answer.output.text().matches("has shown too much before").count(), 2);
        let answer = show(guest, "display(Png((3 << 20) + 1), Png(1))").await;
        assert_eq!(answer.output.text(), "3145729\n[image/png, 3145729 bytes: too large to be shown]\n1\n");
        assert_eq!(answer.shown.len(), 1);
    }
}

#[tokio::test]
async fn an_interrupt_while_something_is_shown_breaks_nothing() {
    for guest in [Some(without_ipython().await.0), with_ipython().await].iter().flatten() {
        show(guest, "class Png:\n    def _repr_png_(self): return b'x' * 3_000_000\npng = Png()").await;
        for limit in [200, 210, 220] {
            let limit = Duration::from_millis(limit);
            let answer = guest.client().ipython("while True: display(png)", limit).await.unwrap();
            assert!(matches!(answer.end, CellEnd::LimitPassed { by: Interrupt::Signal, .. }), "{answer:?}");
            assert_eq!(guest.cell("type(png).__name__").await, "'Png'\n");
        }
    }
}

#[tokio::test]
async fn a_cell_that_writes_to_our_channel_harms_itself_alone() {
    let guest = Guest::start().await;
    let send = r#"
import json, os
def send(body): os.write(60, len(body).to_bytes(4, "little") + body)
def part(cell, mime, data=b"x"):
    head = json.dumps(dict(id=cell, mime=mime)).encode()
    send(b"\1" + len(head).to_bytes(4, "little") + head + data)"#;
    show(&guest, send).await;
    // None of these is a part of this cell.
    let forged = r#"
part(10**9, "image/png")
for cell in range(99): part(cell, "text/x-odd")
for body in (b"", b"\0", b"\0{", b"\1", b"\1\xff\xff\xff\xff", b"\1\1\0\0\0{", b"\2", b'\0{"id": 77, "end": "ok"}', b'\0{"ready": "x"}'): send(body)
"after""#;
    let answer = show(&guest, forged).await;
    assert_eq!((answer.output.text().as_str(), answer.shown.len()), ("'after'\n", 0));
    let answer = show(&guest, "for cell in range(99):\n    for n in range(40): part(cell, 'image/png')").await;
    assert_eq!(answer.shown.len(), 32);
    // No message is as long as this one says that it is.
    let answer = guest.client().ipython("os.write(60, b'\\xff' * 8); 'after'", Duration::from_secs(2)).await.unwrap();
    assert_eq!(answer.end, CellEnd::Died);
    assert_eq!(guest.cell("1").await, "1\n");
}

/// Returns guests whose Python has matplotlib, with IPython and without; none where the machine has it not.
async fn with_matplotlib() -> Vec<(Guest, tempfile::TempDir)> {
    let mut guests = Vec::new();
    for hidden in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        if hidden {
            std::fs::write(folder.path().join("IPython.py"), "raise ImportError").unwrap();
        }
        let guest = Guest::bare(&[
            ("PATH", "/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"),
            ("PYTHONPATH", folder.path().to_str().unwrap()),
            // Where it keeps what it knows about fonts.
            ("MPLCONFIGDIR", folder.path().to_str().unwrap()),
        ]);
        if guest.cell("import matplotlib; 1").await == "1\n" {
            guests.push((guest, folder));
        }
    }
    if guests.is_empty() {
        let _said = writeln!(std::io::stderr(), "skipped: /usr/bin/python3 has no matplotlib here");
    }
    guests
}

#[tokio::test]
async fn figures_come_as_images_where_they_are_shown() {
    for (guest, _folder) in &with_matplotlib().await {
        let plot = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nprint('a')\nplt.show()\nprint('b')\nplt.figure()\nplt.bar([1], [2])\nplt.figure()\nprint('c')";
        let answer = show(guest, plot).await;
        let figure = "<Figure size 640x480 with 1 Axes>\n";
        assert_eq!(answer.output.text(), format!("a\n{figure}b\nc\n{figure}"));
        assert_eq!(places(&answer), [("image/png", 36), ("image/png", 74)]);
        assert!(answer.shown.iter().all(|one| one.data.starts_with(PNG)));
        // They are closed then, and not shown again.
        assert_eq!(show(guest, "plt.get_fignums()").await.output.text(), "[]\n");
        // The value of a cell is shown once, though it is open too.
        let answer = show(guest, "figure, axes = plt.subplots()\nfigure").await;
        assert_eq!(places(&answer), [("image/png", 34)]);
        // One that is made without pyplot is a value like others, and may be shown again.
        let answer =
            show(guest, "from matplotlib.figure import Figure\nf = Figure(); f.subplots(); display(f); f").await;
        assert_eq!(answer.shown.len(), 2);
        // A figure that cannot be drawn is told, and does not come back.
        let answer = show(guest, "plt.title('$\\\\nonsense{$')").await;
        assert_eq!((answer.end.clone(), answer.shown.len()), (CellEnd::Raised, 0), "{answer:?}");
        assert_eq!(show(guest, "1").await.output.text(), "1\n");
        let answer = show(guest, "plt.plot([1])\n1 / 0").await;
        assert_eq!((answer.end.clone(), answer.shown.len()), (CellEnd::Raised, 1));
        if guest.cell("'get_ipython' in globals()").await == "True\n" {
            let answer = show(guest, "%matplotlib inline\nplt.plot([1]);").await;
            assert_eq!((answer.end.clone(), answer.shown.len()), (CellEnd::Ok, 1));
        }
    }
}
