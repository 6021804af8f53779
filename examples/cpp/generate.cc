// Text in, text out, with the stubs that protoc generates and nothing else of Millstream:
//
//   Tokenizer.Encode --ids--> Engine.Generate --ids--> Tokenizer.Detokenize --text--> stdout
//
// Shows streaming, stop strings, both kinds of cancelling, and errors.

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "millstream/v1/engine.grpc.pb.h"
#include "millstream/v1/tokenizer.grpc.pb.h"

namespace v1 = millstream::v1;

namespace {

constexpr uint32_t kHandle = 1;  // our name for the one request of each stream
constexpr int kInterrupted = 130;  // exit code

std::atomic<bool> interrupted = false;

struct Options {
  std::string prompt;
  std::string engine = "localhost:50051";
  std::string tokenizer = "localhost:50052";
  std::vector<std::string> stop;
  float temperature = 0;
  uint32_t max_tokens = 256;
};

[[noreturn]] void Fail(const std::string& what) { throw std::runtime_error(what); }

void Check(const grpc::Status& status, const std::string& service) {
  if (!status.ok()) Fail(service + ": " + status.error_message());
}

std::vector<uint32_t> Encode(v1::Tokenizer::Stub& tokenizer, const std::string& prompt) {
  v1::EncodeRequest request;
  auto* message = request.add_inputs()->mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content(prompt);
  v1::EncodeResponse response;
  grpc::ClientContext context;
  Check(tokenizer.Encode(&context, request, &response), "tokenizer");
  const auto& ids = response.sequences(0).token_ids();
  return {ids.begin(), ids.end()};
}

// The incremental detokenizer's side of one request. Each message has exactly one answer.
class Text {
 public:
  Text(v1::Tokenizer::Stub& tokenizer, const std::vector<std::string>& stop)
      : stream_(tokenizer.Detokenize(&context_)) {
    v1::DetokenizeRequest request;
    auto* opened = request.add_open();
    opened->set_handle(kHandle);
    opened->mutable_stop()->Add(stop.begin(), stop.end());
    Send(request);
  }

  // Prints the text of new tokens; false when a stop string was met and no more is wanted.
  bool Feed(const v1::StepOutput& tokens) {
    v1::DetokenizeRequest request;
    *request.mutable_tokens() = tokens;
    return Send(request);
  }

  // Prints what was held back, as the start of a character or of a stop string.
  void Close() {
    v1::DetokenizeRequest request;
    request.add_close(kHandle);
    Send(request);
    stream_->WritesDone();
    Check(stream_->Finish(), "tokenizer");
  }

 private:
  bool Send(const v1::DetokenizeRequest& request) {
    v1::DetokenizeResponse response;
    if (!stream_->Write(request) || !stream_->Read(&response)) {
      Check(stream_->Finish(), "tokenizer");
      Fail("tokenizer: the stream ended");
    }
    for (const auto& text : response.texts()) std::cout << text << std::flush;
    for (const auto& failed : response.failed()) Fail("tokenizer: " + failed.status().message());
    return response.stopped().empty();
  }

  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::DetokenizeRequest, v1::DetokenizeResponse>> stream_;
};

// Ctrl-C cancels the RPC, and with it the request, whatever the engine does at that moment.
void CancelOnInterrupt(grpc::ClientContext& context) {
  sigset_t interrupt;
  sigemptyset(&interrupt);
  sigaddset(&interrupt, SIGINT);
  pthread_sigmask(SIG_BLOCK, &interrupt, nullptr);
  std::thread([interrupt, &context] {
    int number;
    sigwait(&interrupt, &number);
    interrupted = true;
    context.TryCancel();
  }).detach();
}

void Generate(v1::Engine::Stub& engine, std::vector<uint32_t> ids, const Options& options,
              Text& text, grpc::ClientContext& context) {
  auto stream = engine.Generate(&context);
  v1::GenerateRequest request;
  auto* submission = request.add_submit();
  submission->set_handle(kHandle);
  submission->mutable_token_ids()->Add(ids.begin(), ids.end());
  submission->mutable_sampling()->set_temperature(options.temperature);
  submission->mutable_sampling()->set_max_tokens(options.max_tokens);
  stream->Write(request);

  bool stopped = false;
  v1::GenerateResponse message;
  while (stream->Read(&message)) {
    for (const auto& rejected : message.rejected()) Fail("engine: " + rejected.status().message());
    if (!stopped && message.output().token_ids_size() > 0 && !text.Feed(message.output())) {
      // The engine knows no text: who meets the stop string tells it.
      stopped = true;
      v1::GenerateRequest cancellation;
      cancellation.add_cancel(kHandle);
      stream->Write(cancellation);
    }
    for (const auto& finished : message.finished()) {
      if (finished.has_status() && !stopped) Fail("engine: " + finished.status().message());
      stream->WritesDone();  // no more requests: the engine ends the stream
    }
  }
  Check(stream->Finish(), "engine");
  if (!stopped) text.Close();
  std::cout << std::endl;
}

Options Parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name.rfind("--", 0) != 0) {
      options.prompt = name;
      continue;
    }
    if (++i == argc) Fail(name + " needs a value");
    const std::string value = argv[i];
    if (name == "--engine") options.engine = value;
    else if (name == "--tokenizer") options.tokenizer = value;
    else if (name == "--stop") options.stop.push_back(value);
    else if (name == "--temperature") options.temperature = std::stof(value);
    else if (name == "--max-tokens") options.max_tokens = std::stoul(value);
    else Fail("unknown flag " + name);
  }
  if (options.prompt.empty()) Fail("usage: generate [flags] PROMPT");
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  grpc::ClientContext context;
  CancelOnInterrupt(context);  // before gRPC's threads start, so that they inherit the mask
  try {
    const Options options = Parse(argc, argv);
    const auto credentials = grpc::InsecureChannelCredentials();
    auto tokenizer = v1::Tokenizer::NewStub(grpc::CreateChannel(options.tokenizer, credentials));
    auto engine = v1::Engine::NewStub(grpc::CreateChannel(options.engine, credentials));
    Text text(*tokenizer, options.stop);
    Generate(*engine, Encode(*tokenizer, options.prompt), options, text, context);
  } catch (const std::exception& error) {
    if (interrupted) return kInterrupted;
    std::cerr << "generate: " << error.what() << std::endl;
    return EXIT_FAILURE;
  }
}
