//! The whole run, in processes, with a tiny encoder; and what users get for inputs that cannot be used.

use std::{
    fs,
    process::{Output, Stdio},
    time::Duration,
};

use crate::tiny::{Kind, Outcome, Tiny};
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader},
    net::TcpStream,
    process::Command,
    time::timeout,
};

/// The longest duration of a run.
const LIMIT: Duration = Duration::from_secs(50);

fn command(tiny: &Tiny, rest: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_live-search"));
    command.arg("run").arg("--model").arg(tiny.model()).arg("--descriptions").arg(tiny.descriptions());
    command.arg("--work").arg(tiny.folder().join("work")).args(rest).kill_on_drop(true);
    command
}

async fn run(tiny: &Tiny, rest: &[&str]) -> Result<Output, Box<dyn std::error::Error + Send + Sync>> {
    Ok(timeout(LIMIT, command(tiny, rest).output()).await??)
}

#[tokio::test]
async fn services_answer_while_trainer_and_service_are_killed() -> Outcome {
    whole_run(Kind::Bert).await
}

#[tokio::test]
async fn a_table_is_tuned_and_followed_like_layers() -> Outcome {
    whole_run(Kind::Table).await
}

async fn whole_run(kind: Kind) -> Outcome {
    let tiny = Tiny::make(kind)?;
    let json = tiny.folder().join("report.json");
    let path = json.display().to_string();
    let sizes = ["--train", "40", "--held-out", "20", "--versions", "8", "--seconds", "0.5", "--rate", "40"];
    let ended = run(&tiny, &[&sizes[..], &["--json", &path]].concat()).await?;
    let text =
        format!("{}{}", String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success(), "{text}");

    let report: Value = serde_json::from_str(&fs::read_to_string(&json)?)?;
    let number = |pointer: &str| report.pointer(pointer).and_then(Value::as_u64);
    assert_eq!(number("/checks/differences"), Some(0), "{text}");
    assert!(number("/checks/made") > Some(4), "{text}");
    assert_eq!(number("/queries/failed"), Some(0), "{text}");
    assert!(number("/trainer/version") > number("/trainer/held"), "{text}");
    assert!(number("/service/version") >= number("/service/held"), "{text}");
    assert!(number("/moved/0/each") < Some(256), "over shared memory the contents are views: {text}");
    let (all, each) = (number("/moved/1/bytes_of_version"), number("/moved/1/each"));
    assert!(each > Some(1000) && each < all, "over TCP what changed is moved: {text}");
    Ok(())
}

/// Returns when nobody listens at the address of the log's first line. A connection that ends is the event that is waited for.
async fn gone(tiny: &Tiny, process: &str) -> Outcome {
    let log = fs::read_to_string(tiny.folder().join("work").join(format!("{process}.log")))?;
    let address = log.lines().next().and_then(|line| line.rsplit([' ', '/']).next()).ok_or("an empty log")?;
    while let Ok(mut connection) = TcpStream::connect(address).await {
        // A reset is an end, too.
        drop(connection.read_to_end(&mut Vec::new()).await);
    }
    Ok(())
}

#[tokio::test]
async fn no_process_outlives_a_run_that_is_killed() -> Outcome {
    let tiny = Tiny::make(Kind::Bert)?;
    let sizes = ["--train", "40", "--held-out", "20", "--seconds", "100"];
    let mut child = command(&tiny, &sizes).stdout(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(child.stdout.take().ok_or("no output")?).lines();
    let begun = async {
        while let Some(line) = lines.next_line().await? {
            if line.contains("queries for") {
                return Ok(());
            }
        }
        Outcome::Err("it ended before the queries".into())
    };
    timeout(LIMIT, begun).await??;
    child.kill().await?;
    for process in ["trainer", "search-shm", "search-tcp"] {
        timeout(LIMIT, gone(&tiny, process)).await.map_err(|_| format!("{process} outlived the run"))??;
    }
    Ok(())
}

#[tokio::test]
async fn missing_inputs_are_errors_that_name_the_remedy() -> Outcome {
    let tiny = Tiny::make(Kind::Bert)?;
    let few = run(&tiny, &["--train", "400"]).await?;
    let text = String::from_utf8_lossy(&few.stderr);
    assert!(
        !few.status.success() && text.contains("60 usable packages") && text.contains("apt-helper"),
        "{text}"
    );

    for file in ["tokenizer.json", "config.json", "model.safetensors"] {
        let path = tiny.model().join(file);
        let content = fs::read(&path)?;
        fs::remove_file(&path)?;
        let missing = run(&tiny, &["--train", "40", "--held-out", "20"]).await?;
        let text = String::from_utf8_lossy(&missing.stderr);
        assert!(
            !missing.status.success() && text.contains(file) && text.contains("live_search/run"),
            "{file}: {text}"
        );
        fs::write(&path, content)?;
    }

    fs::remove_file(tiny.descriptions())?;
    let none = run(&tiny, &[]).await?;
    let text = String::from_utf8_lossy(&none.stderr);
    assert!(
        !none.status.success() && text.contains("--descriptions") && text.contains("apt-helper"),
        "{text}"
    );
    Ok(())
}
