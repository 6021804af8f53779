// Text in, text out, with stubs that ts-proto generates and nothing else of Millstream:
//
//   Tokenizer.encode --ids--> Engine.generate --ids--> Tokenizer.detokenize --text--> stdout
//
// Shows streaming, stop strings, both kinds of cancelling, and errors.

import { parseArgs, promisify } from "node:util";
import { credentials, status, type ClientDuplexStream, type ServiceError } from "@grpc/grpc-js";
import { EngineClient, GenerateRequest, GenerateResponse, StepOutput } from "./stubs/millstream/v1/engine.js";
import {
  type DeepPartial,
  DetokenizeRequest,
  DetokenizeResponse,
  EncodeRequest,
  type EncodeResponse,
  TokenizerClient,
} from "./stubs/millstream/v1/tokenizer.js";

const HANDLE = 1; // our name for the one request of each stream

/** Token ids of a question, through the model's chat template. */
async function encode(tokenizer: TokenizerClient, prompt: string): Promise<number[]> {
  const request = EncodeRequest.fromPartial({
    inputs: [{ chat: { messages: [{ role: "user", content: prompt }] } }],
  });
  const call = promisify<EncodeRequest, EncodeResponse>(tokenizer.encode.bind(tokenizer));
  return (await call(request)).sequences[0].tokenIds;
}

/** The end of an RPC; rejects when its status is not OK, also if nobody was reading just then. */
function ending<I, O>(stream: ClientDuplexStream<I, O>): Promise<void> {
  stream.on("error", () => {}); // the status says the same; without a listener the process would end
  const end = new Promise<void>((resolve, reject) => {
    stream.on("status", (ended) => {
      if (ended.code === status.OK) resolve();
      else reject(Object.assign(new Error(ended.details), ended));
    });
  });
  end.catch(() => {}); // who awaits it hears of it
  return end;
}

/** The incremental detokenizer's side of one request. Each message has exactly one answer. */
class Text {
  private readonly stream: ClientDuplexStream<DetokenizeRequest, DetokenizeResponse>;
  private readonly end: Promise<void>;
  private readonly answers: AsyncIterator<DetokenizeResponse>;

  constructor(tokenizer: TokenizerClient, private readonly stop: string[]) {
    this.stream = tokenizer.detokenize();
    this.end = ending(this.stream);
    this.answers = this.stream[Symbol.asyncIterator]();
  }

  open(): Promise<boolean> {
    return this.send({ open: [{ handle: HANDLE, stop: this.stop }] });
  }

  /** Prints the text of new tokens; false when a stop string was met and no more is wanted. */
  feed(tokens: StepOutput): Promise<boolean> {
    return this.send({ tokens });
  }

  /** Prints what was held back, as the start of a character or of a stop string. */
  async close(): Promise<void> {
    await this.send({ close: [HANDLE] });
    this.stream.end();
  }

  cancel(): void {
    this.stream.cancel();
  }

  private async send(request: DeepPartial<DetokenizeRequest>): Promise<boolean> {
    this.stream.write(DetokenizeRequest.fromPartial(request));
    const { value, done } = await this.answers.next();
    if (done) {
      await this.end;
      throw new Error("the tokenizer ended the stream");
    }
    const answer: DetokenizeResponse = value;
    for (const text of answer.texts) process.stdout.write(text);
    for (const failed of answer.failed) throw new Error(failed.status?.message);
    return answer.stopped.length === 0;
  }
}

interface Sampling {
  temperature: number;
  maxTokens: number;
}

async function generate(
  stream: ClientDuplexStream<GenerateRequest, GenerateResponse>,
  tokenIds: number[],
  sampling: Sampling,
  text: Text,
): Promise<void> {
  const end = ending(stream);
  await text.open();
  stream.write(GenerateRequest.fromPartial({ submit: [{ handle: HANDLE, tokenIds, sampling }] }));
  let stopped = false;
  for await (const message of stream as AsyncIterable<GenerateResponse>) {
    for (const rejected of message.rejected) throw new Error(rejected.status?.message);
    if (message.output && !stopped && !(await text.feed(message.output))) {
      // The engine knows no text: who meets the stop string tells it.
      stopped = true;
      stream.write(GenerateRequest.fromPartial({ cancel: [HANDLE] }));
    }
    for (const finished of message.finished) {
      if (finished.status && !stopped) throw new Error(finished.status.message);
      stream.end(); // no more requests: the engine ends the stream
    }
  }
  await end;
  if (!stopped) await text.close();
  process.stdout.write("\n");
}

const { values: flags, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    engine: { type: "string", default: "localhost:50051" },
    tokenizer: { type: "string", default: "localhost:50052" },
    stop: { type: "string", multiple: true, default: [] },
    temperature: { type: "string", default: "0" },
    "max-tokens": { type: "string", default: "256" },
  },
});

const prompt = positionals[0];
if (!prompt) {
  console.error("usage: generate [flags] PROMPT");
  process.exit(2);
}
const engine = new EngineClient(flags.engine, credentials.createInsecure());
const tokenizer = new TokenizerClient(flags.tokenizer, credentials.createInsecure());
try {
  const tokenIds = await encode(tokenizer, prompt);
  const sampling = { temperature: Number(flags.temperature), maxTokens: Number(flags["max-tokens"]) };
  const text = new Text(tokenizer, flags.stop);
  const stream = engine.generate();
  // Ctrl-C cancels the RPC, and with it the request, whatever the engine does at that moment.
  process.once("SIGINT", () => stream.cancel());
  try {
    await generate(stream, tokenIds, sampling, text);
  } finally {
    stream.cancel();
    text.cancel();
  }
} catch (error) {
  const { code, details, message } = error as ServiceError;
  if (code !== status.CANCELLED) console.error(`generate: ${details ?? message}`);
  process.exitCode = code === status.CANCELLED ? 130 : 1;
} finally {
  engine.close();
  tokenizer.close();
}
